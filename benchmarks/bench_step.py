"""One training step of the demo model in one process: moec's plan against the same model in plain PyTorch.

The two take turns on the same batches, so that whatever else the machine does slows both; a figure is the median of the
ratios of neighbours. With one thread, times are those of the processor, which do not count other processes. Both train
from the same weights with the same optimizer, and must find the same losses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from plain_moe import PlainModel
from plain_weights import plain_state_dict
from report import Row, median, parser, report
from torch import Tensor, nn

import moec
from moec.grammar.spec import Spec
from moec.runtime.optimizers.optimizer import make_optimizer
from moec.runtime.weights.masters import Master

FILE = Path(__file__).parents[1] / "examples" / "tiny.moe"
LIMIT = 1.05
MAX_NORM = 1.0
LEARNING_RATE = 1e-5
"""So low that training does not amplify rounding differences: losses are comparable at every step."""

SAME_LOSS = 1e-5
"""Largest relative difference of the losses."""

PARTS = ("forward", "backward", "clip", "optimizer")


class Contender:
    """A model, its optimizer, and the times of the parts of its steps."""

    clock = staticmethod(time.process_time)

    def __init__(
        self, loss: Callable[[Tensor, Tensor], Tensor], clip: Callable[[], object], optimizer: torch.optim.Optimizer
    ) -> None:
        self.loss, self.clip, self.optimizer = loss, clip, optimizer
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One training step; gives the loss."""
        with self.timed("forward"):
            loss = self.loss(tokens, labels)
        with self.timed("backward"):
            loss.backward()
        with self.timed("clip"):
            self.clip()
        with self.timed("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = self.clock()
        yield
        self.seconds[part].append(self.clock() - started)

    def totals(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.seconds.values(), strict=True)]


def ours(job: moec.Job) -> tuple[Contender, nn.Module]:
    model = job.build()
    clip = lambda: job.clip_grad_norm_(model, MAX_NORM)  # noqa: E731
    return Contender(lambda tokens, labels: model(tokens, labels).loss, clip, job.optimizer(model)), model


def handwritten(spec: Spec, weights: dict[str, Tensor]) -> Contender:
    model = PlainModel(spec)
    model.load_state_dict(plain_state_dict(weights))
    parameters = list(model.parameters())
    assert spec.train is not None
    masters = [Master(parameter, parameter.dim() > 1) for parameter in parameters]
    optimizer = make_optimizer(spec.update, masters)
    clip = lambda: nn.utils.clip_grad_norm_(parameters, MAX_NORM)  # noqa: E731
    return Contender(lambda tokens, labels: model(tokens, labels)[1], clip, optimizer)


def measure(spec: Spec, pair: tuple[Contender, Contender], steps: int, warm_up: int) -> float:
    """Trains both in turns; gives the largest relative difference of their losses."""
    assert spec.train is not None
    generator = torch.Generator().manual_seed(0)
    shape = (2, spec.train.batch, spec.train.sequence)
    worst = 0.0
    for step in range(warm_up + steps):
        tokens, labels = torch.randint(spec.model.vocab, shape, generator=generator)
        losses = {}
        # The order alternates: the second run has the batch in cache.
        for contender in pair if step % 2 else reversed(pair):
            losses[contender] = contender.step(tokens, labels)
        first, second = (losses[contender] for contender in pair)
        worst = max(worst, abs(first - second) / abs(second))
        if step + 1 == warm_up:
            for contender in pair:
                contender.seconds = {part: [] for part in PARTS}
    return worst


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--file", default=FILE, help="a `.moe` file with `let ranks` (default: the demo's)")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.threads > 1:
        Contender.clock = staticmethod(time.perf_counter)
    plan = moec.compile(chosen.file, ranks=1)
    with moec.launch(plan, device="cpu") as job:
        contender, model = ours(job)
        plain = handwritten(plan.spec, dict(model.named_parameters()))
        worst = measure(plan.spec, (contender, plain), chosen.steps, warm_up=5)

    def ratio(mine: list[float], theirs: list[float]) -> float:
        return median([a / b for a, b in zip(mine, theirs, strict=True)])

    rows = [
        Row("moec, a step", 1e3 * median(contender.totals()), "ms"),
        Row("plain PyTorch, a step", 1e3 * median(plain.totals()), "ms"),
        Row("ratio of a step", ratio(contender.totals(), plain.totals()), "", LIMIT),
    ]
    for part in PARTS:
        mine, theirs = contender.seconds[part], plain.seconds[part]
        share = sum(theirs) / sum(plain.totals())
        rows.append(Row(f"  of {part} ({share:.0%} of plain's time)", ratio(mine, theirs)))
    rows.append(Row("largest relative difference of losses", worst, "", SAME_LOSS))
    threads = "1 thread" if chosen.threads == 1 else f"{chosen.threads} threads"
    report(f"one training step of {plan.name} in one process, {threads}", rows, chosen.json)
    if worst > SAME_LOSS:
        sys.exit("the two do not compute the same losses: the ratios mean nothing")


if __name__ == "__main__":
    main()

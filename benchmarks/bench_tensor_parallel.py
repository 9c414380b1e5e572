"""A training step with tp 2 and ep 2 on four gloo ranks: moec's plan against the same sharding by hand.

Both train in the same four processes, from the same weights, on the same batches, in turns; a figure is the median of
the ratios of neighbours. They must find the same losses. Bytes are those that leave a rank, counted at every
collective, and the least that these algorithms need: Megatron's sequence parallelism, one all-to-all row per choice of
another rank's expert, gradients summed by rings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_gloo import RANKS, Choices, mean_over_ranks
from plain_tensor_parallel import ShardedModel
from plain_weights import plain_state_dict
from report import Row, median, parser, report
from torch import Tensor, nn

import moec
from moec.grammar.spec import Spec
from moec.runtime.optimizers.optimizer import make_optimizer
from moec.runtime.ranks.groups import resolve
from moec.runtime.weights.masters import Master

FILE = Path(__file__).parents[1] / "examples" / "folded.moe"
LIMIT = 1.10
MAX_NORM = 1.0
LEARNING_RATE = 1e-5
"""So low that training does not amplify rounding differences: losses are comparable at every step."""
SAME_LOSS = 1e-5
WARM_UP = 3

KINDS = {
    "all_gather_single": "activations",
    "all_gather_into_tensor": "activations",
    "reduce_scatter_single": "activations",
    "reduce_scatter_tensor": "activations",
    "all_to_all_single": "rows",
    "all_reduce": "sums",
}
Step = Callable[[Tensor, Tensor], Tensor]


class Sent:
    """Counts the bytes that leave this rank, by kind of collective; sums and gathers go round in rings."""

    def __init__(self) -> None:
        self.bytes: dict[str, float] = defaultdict(float)
        self.depth = 0
        import plain_tensor_parallel

        from moec.runtime.ops import dense_collectives

        self.places = [(dist, name, name) for name in KINDS if hasattr(dist, name)]
        for module, prefix in (
            (dense_collectives, "_all_gather_single"),
            (dense_collectives, "_reduce_scatter_single"),
        ):
            self.places.append((module, prefix, prefix.removeprefix("_")))
        for name in ("gather_single", "reduce_scatter_single"):
            self.places.append((plain_tensor_parallel, name, "all_" * (name[0] == "g") + name))
        self.originals = [getattr(module, name) for module, name, _ in self.places]

    def __enter__(self) -> Sent:
        for (module, name, kind), original in zip(self.places, self.originals, strict=True):
            setattr(module, name, self.counted(kind, original))
        return self

    def __exit__(self, *_: object) -> None:
        for (module, name, _), original in zip(self.places, self.originals, strict=True):
            setattr(module, name, original)

    def counted(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            # One may be written in terms of another.
            if not self.depth:
                self.bytes[KINDS[kind]] += leaving(kind, *arguments, **options)
            self.depth += 1
            try:
                return original(*arguments, **options)
            finally:
                self.depth -= 1

        return call


def leaving(kind: str, first: Tensor, second: object = None, *rest: Any, group: Any = None, **_: Any) -> float:
    """Bytes that leave this rank in one collective."""
    ranks = dist.get_world_size(group)
    if kind == "all_reduce":
        return first.nbytes * 2 * (ranks - 1) / ranks
    assert isinstance(second, Tensor)
    if kind == "all_to_all_single":
        kept = second.shape[0] / ranks if len(rest) < 2 else rest[1][dist.get_rank(group)]
        return second.nbytes * (1 - kept / max(1, second.shape[0]))
    whole = first if kind.startswith("all_gather") else second
    return whole.nbytes * (ranks - 1) / ranks


def least_bytes(job: moec.Job, model: nn.Module, shape: tuple[int, int], chosen: list[Tensor]) -> dict[str, float]:
    """The bytes that this rank must send in a step with these choices, in fp32."""
    spec = job.plan.spec
    dim, layers = spec.model.dim, len(spec.model.layers)
    tp, ep = job.plan.meshes["dense"].size("tp"), resolve("ep[0..3]")
    whole = 4 * shape[0] * shape[1] * dim * (tp - 1) / tp
    rows = 0
    for experts, layer in zip(chosen, spec.model.layers, strict=True):
        assert layer.moe is not None
        rows += int((experts // (layer.moe.experts.count // ep.size()) != ep.rank()).sum())
    gradients = 0.0
    for name, parameter in model.named_parameters():
        ranks = 1
        for group in job.plan.parameters[name].sum_over:
            ranks *= resolve(group).size()
        gradients += parameter.nbytes * 2 * (ranks - 1) / ranks
    return {
        # In and out of every layer's attention, after the embedding and before the head; again in backward.
        "activations": 2 * (2 * layers + 2) * whole,
        # To the expert and back; again in backward.
        "rows": 4 * rows * dim * 4,
        "sums": gradients,
    }


# ---- one rank ------------------------------------------------------------------------------------------


def ours(job: moec.Job) -> tuple[Step, nn.Module]:
    model = job.build()
    optimizer = slow(job.optimizer(model))

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = job.step(model, tokens, labels)
        job.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def by_hand(spec: Spec, weights: dict[str, Tensor]) -> Step:
    groups = [resolve(name) for name in ("dp", "tp", "ep[0..3]", "edp[0..3]")]
    model = ShardedModel(spec, *groups)
    model.load_state_dict(plain_state_dict(weights))
    parameters = list(model.parameters())
    assert spec.train is not None
    masters = [Master(parameter, parameter.dim() > 1) for parameter in parameters]
    optimizer = slow(make_optimizer(spec.update, masters))

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss, value = model(tokens, labels)
        loss.backward()
        model.reduce_gradients()
        model.clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def slow(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return optimizer


def rank_main(steps: int, dim: int, sequence: int, result: Path) -> None:
    """The function of every rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    with moec.launch(moec.compile(FILE, dim=dim, sequence=sequence), device="cpu") as job:
        train = job.plan.spec.train
        assert train is not None
        mine, model = ours(job)
        theirs = by_hand(job.plan.spec, dict(model.named_parameters()))
        generator = torch.Generator().manual_seed(job.data_rank)
        shape = (train.batch // job.data_size, train.sequence)

        def batch() -> Tensor:
            return torch.randint(job.plan.spec.model.vocab, (2, *shape), generator=generator)

        seconds: tuple[list[float], list[float]] = ([], [])
        worst = 0.0
        for number in range(WARM_UP + steps):
            tokens, labels = batch()
            losses = [torch.zeros(()), torch.zeros(())]
            for which in (0, 1) if number % 2 else (1, 0):
                dist.barrier()
                started = time.perf_counter()
                losses[which] = (mine, theirs)[which](tokens, labels)
                dist.barrier()
                if number >= WARM_UP:
                    seconds[which].append(time.perf_counter() - started)
            worst = max(worst, float(abs(losses[0] - losses[1]) / losses[1]))
        figures = {"moec": median(seconds[0]), "by hand": median(seconds[1]), "losses": worst}
        figures["ratio"] = median([a / b for a, b in zip(*seconds, strict=True)])
        tokens, labels = batch()
        choices = Choices()
        with Sent() as sent, choices:
            mine(tokens, labels)
        with Sent() as sent_by_hand:
            theirs(tokens, labels)
        for kind, least in least_bytes(job, model, shape, choices.experts).items():
            figures |= {f"least {kind}": least, f"sent {kind}": sent.bytes[kind]}
            figures[f"by hand {kind}"] = sent_by_hand.bytes[kind]
        figures = mean_over_ranks(figures)
    if job.rank == 0:
        result.write_text(json.dumps(figures))


# ---- the whole -----------------------------------------------------------------------------------------


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--sequence", type=int, default=256)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MOEC_BENCH_RESULT": str(result)}
        sizes = [str(chosen.steps), str(chosen.dim), str(chosen.sequence)]
        command = [sys.executable, *launcher, __file__, *sizes]
        subprocess.run(command, env=environment, check=True)
        figures = json.loads(result.read_text())
    rows = [
        Row("moec, a step", 1e3 * figures["moec"], "ms"),
        Row("by hand, a step", 1e3 * figures["by hand"], "ms"),
        Row("ratio of a step", figures["ratio"], "", LIMIT),
        Row("largest relative difference of losses", figures["losses"], "", SAME_LOSS),
    ]
    kinds = ("activations", "rows", "sums")
    for kind in kinds:
        least = figures[f"least {kind}"]
        rows.append(Row(f"{kind}, least per rank and step", least / 1e6, "MB"))
        rows.append(Row(f"{kind}, moec / least", figures[f"sent {kind}"] / least))
        rows.append(Row(f"{kind}, by hand / least", figures[f"by hand {kind}"] / least))
    least_all = sum(figures[f"least {kind}"] for kind in kinds)
    rows.append(Row("all bytes, moec / least", sum(figures[f"sent {kind}"] for kind in kinds) / least_all))
    report(f"folded.moe, dim {chosen.dim}, tp 2 and ep 2 on 4 gloo ranks", rows, chosen.json)
    if figures["losses"] > SAME_LOSS:
        sys.exit("the two do not compute the same losses: the ratios mean nothing")


if __name__ == "__main__":
    target = os.environ.get("MOEC_BENCH_RESULT")
    if target and "RANK" in os.environ:
        rank_main(*(int(number) for number in sys.argv[1:4]), result=Path(target))
    else:
        main()

"""The demo model on four gloo ranks: time per step, its fraction in collectives, and the bytes sent.

Every collective is timed where it is called. A second run puts a barrier before each, which tells waiting for the
slowest rank (four ranks may share two cores) from moving. Bytes are those that leave a rank; the minimum sends a token
once to every other rank that holds any of its experts, and back, in both passes, and sums gradients by a ring.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Row, median, parser, report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moec
from moec.runtime.model.module import PlanModule

FILE = Path(__file__).parents[1] / "examples" / "tiny.moe"
RANKS = 4
PASSES = 4
"""How often a row is sent: dispatch and combine, forward and backward."""

LEARNING_RATE = 1e-5
"""So low that routing stays as balanced as initially; random tokens teach nothing."""

COLLECTIVES = ("all_to_all_single", "all_reduce", "broadcast")


class Meter:
    """Replaces torch.distributed's collectives, and records seconds and bytes of each."""

    def __init__(self, barrier: bool) -> None:
        self.barrier = barrier
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)
        self.originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def __enter__(self) -> Meter:
        for name, original in self.originals.items():
            setattr(dist, name, self.metered(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def metered(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.barrier:
                with self.timed("barrier"):
                    dist.barrier()
            self.bytes[name] += sent(name, *arguments, **options)
            with self.timed(name):
                work = original(*arguments, **options)
            return work and MeteredWork(work, self, name)

        return call

    def timed(self, name: str) -> Timer:
        return Timer(self.seconds, name)


class Timer:
    """Adds the seconds of a `with` block to an entry."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] += time.perf_counter() - self.started


class MeteredWork:
    """An asynchronous collective, whose wait is timed too."""

    def __init__(self, work: dist.Work, meter: Meter, name: str) -> None:
        self.work, self.meter, self.name = work, meter, name

    def wait(self) -> None:
        with self.meter.timed(self.name):
            self.work.wait()


def sent(name: str, *arguments: Any, group: Any = None, **_: Any) -> float:
    """Bytes that leave this rank; of a sum, those of a ring."""
    ranks = dist.get_world_size(group)
    if name == "all_to_all_single":
        source: Tensor = arguments[1]
        kept = source.shape[0] / ranks if len(arguments) < 4 else arguments[3][dist.get_rank(group)]
        return source.nbytes * (1 - kept / max(1, source.shape[0]))
    return arguments[0].nbytes * (2 * (ranks - 1) / ranks if name == "all_reduce" else 1)


class Choices(TorchDispatchMode):
    """Records the chosen experts of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: list[Tensor] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator is torch.ops.moec.route.default:
            self.experts.append(result[2])
        return result


def least_bytes(job: moec.Job, model: PlanModule, chosen: list[Tensor]) -> dict[str, float]:
    """The bytes that this rank must send in a step with these choices."""
    spec = job.plan.spec
    rows = 0
    for experts, layer in zip(chosen, (layer for layer in spec.model.layers if layer.moe), strict=True):
        assert layer.moe is not None
        ranks = experts.flatten(0, 1) // (layer.moe.experts.count // job.world_size)
        holds = torch.zeros(len(ranks), job.world_size).scatter_(1, ranks, 1.0)
        rows += int(holds.sum() - holds[:, job.rank].sum())
    parameters = dict(model.named_parameters())
    summed = sum(p.nbytes for name, p in parameters.items() if job.plan.parameters[name].sum_over)
    element = next(iter(parameters.values())).element_size()
    return {
        "all_to_all_single": PASSES * rows * spec.model.dim * element,
        "all_reduce": summed * 2 * (job.world_size - 1) / job.world_size,
    }


# ---- one rank ------------------------------------------------------------------------------------------


def rank_main(steps: int, result: Path) -> None:
    """The function of every rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    with moec.launch(moec.compile(FILE, ranks=RANKS), device="cpu") as job:
        train = job.plan.spec.train
        assert train is not None
        model = job.build()
        optimizer = job.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        torch.manual_seed(job.data_rank)
        shape = (2, train.batch // job.data_size, train.sequence)

        def step() -> float:
            started = time.perf_counter()
            tokens, labels = torch.randint(job.plan.spec.model.vocab, shape)
            job.step(model, tokens, labels)
            job.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - started

        for _ in range(3):
            step()
        figures = measure(step, steps)
        choices = Choices()
        with Meter(barrier=False) as meter, choices:
            step()
        figures |= {f"sent {name}": meter.bytes[name] for name in COLLECTIVES}
        figures |= {f"least {name}": least for name, least in least_bytes(job, model, choices.experts).items()}
        figures = mean_over_ranks(figures)
    if job.rank == 0:
        result.write_text(json.dumps(figures))


def measure(step: Callable[[], float], steps: int) -> dict[str, float]:
    """Seconds of a step, and of it in collectives, as they are and with barriers before each."""
    before = loopback_bytes()
    with Meter(barrier=False) as plain:
        seconds = [step() for _ in range(steps)]
    dist.barrier()
    loopback = loopback_bytes() - before
    with Meter(barrier=True) as guarded:
        guarded_seconds = [step() for _ in range(steps)]
    moving = sum(value for name, value in guarded.seconds.items() if name != "barrier")
    return {
        "step": median(seconds),
        "collectives": sum(plain.seconds.values()) / sum(seconds),
        "waiting": guarded.seconds["barrier"] / sum(guarded_seconds),
        "moving": moving / sum(guarded_seconds),
        "loopback": loopback / steps / RANKS,
    }


def loopback_bytes() -> float:
    """Bytes that this machine has sent to itself, where Linux counts them."""
    counters = Path("/proc/net/dev")
    if not counters.exists():
        return 0.0
    (line,) = (line for line in counters.read_text().splitlines() if line.strip().startswith("lo:"))
    return float(line.split()[9])


def mean_over_ranks(figures: dict[str, float]) -> dict[str, float]:
    values = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(figures, (values / RANKS).tolist(), strict=True))


# ---- the whole -----------------------------------------------------------------------------------------


def main() -> None:
    options: ArgumentParser = parser(__doc__)
    options.add_argument("--steps", type=int, default=20)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MOEC_BENCH_GLOO": str(result)}
        command = [sys.executable, *launcher, __file__, "--steps", str(chosen.steps)]
        subprocess.run(command, env=environment, check=True)
        figures = json.loads(result.read_text())
    report("the demo model on 4 gloo ranks", rows(figures), chosen.json)


def rows(figures: dict[str, float]) -> list[Row]:
    found = [
        Row("a step", 1e3 * figures["step"], "ms"),
        Row("in collectives", 100 * figures["collectives"], "%"),
        Row("with a barrier before each: waiting", 100 * figures["waiting"], "%"),
        Row("with a barrier before each: moving", 100 * figures["moving"], "%"),
    ]
    for name, what in (("all_to_all_single", "rows and counts"), ("all_reduce", "gradients and scalars")):
        least = figures[f"least {name}"]
        found.append(Row(f"{what}, minimum per rank and step", least / 1e6, "MB"))
        found.append(Row(f"{what}, sent / minimum", figures[f"sent {name}"] / least))
    sent_all = sum(figures[f"sent {name}"] for name in COLLECTIVES)
    least_all = sum(value for name, value in figures.items() if name.startswith("least"))
    found.append(Row("all bytes, sent / minimum", sent_all / least_all))
    if figures["loopback"]:
        found.append(Row("the loopback device's count / minimum", figures["loopback"] / least_all))
    return found


if __name__ == "__main__":
    target = os.environ.get("MOEC_BENCH_GLOO")
    if target and "RANK" in os.environ:
        rank_main(int(sys.argv[sys.argv.index("--steps") + 1]), Path(target))
    else:
        main()

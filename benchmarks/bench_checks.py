"""The cost of checks: steps of the demo model on gloo ranks, by default and without any check.

There is one core per rank unless `--ranks` asks for more ranks.

The two take turns on the same model and batches, so that whatever else the machine does slows both; the figure is the
median of the ratios of neighbours. Without checks, ranks do not even compare shapes: a job never runs like this. Both
count the labels and tokens of all ranks in one sum, which checks share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Row, median, parser, report

import moec
from moec.runtime.ranks.checks import Checks

FILE = Path(__file__).parents[1] / "examples" / "tiny.moe"
LIMIT = 1.01
RESULT = "MOEC_BENCH_CHECKS"


class Unchecked(Checks):
    """Checks nothing. The step's labels and tokens are still counted over all ranks."""

    def __init__(self) -> None:
        super().__init__("none")

    def require(
        self, site: str, complaint: Any, *matching: Any, inputs: Any = None, counts: Sequence[int] = ()
    ) -> list[int]:
        if not counts:
            return []
        totals = torch.tensor(counts)
        dist.all_reduce(totals)
        return totals.tolist()


def rank_main(ranks: int, steps: int, result: Path) -> None:
    """The function of every rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    with moec.launch(moec.compile(FILE, ranks=ranks), device="cpu") as job:
        train = job.plan.spec.train
        assert train is not None
        model = job.build()
        torch.manual_seed(job.data_rank)
        shape = (2, train.batch // job.data_size, train.sequence)
        home, own, unchecked = model._home, job.checks, Unchecked()
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for step in range(steps + 4):
            tokens, labels = torch.randint(job.plan.spec.model.vocab, shape)
            for checked in (True, False) if step % 2 else (False, True):
                home.checks = job.checks = own if checked else unchecked
                dist.barrier()
                started = time.perf_counter()
                job.step(model, tokens, labels)
                dist.barrier()
                if step >= 4:
                    seconds[checked].append(time.perf_counter() - started)
                model.zero_grad()
        home.checks = job.checks = own
    if job.rank == 0:
        result.write_text(json.dumps([seconds[True], seconds[False]]))


def main() -> None:
    options: ArgumentParser = parser(__doc__)
    options.add_argument("--steps", type=int, default=300)
    cores = min(4, os.cpu_count() or 1)
    options.add_argument(
        "--ranks", type=int, default=cores, help="more than there are cores wait for each other's turns"
    )
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(chosen.ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", RESULT: str(result)}
        command = [sys.executable, *launcher, __file__, str(chosen.ranks), str(chosen.steps)]
        subprocess.run(command, env=environment, check=True)
        checked, unchecked = json.loads(result.read_text())
    ratio = median([a / b for a, b in zip(checked, unchecked, strict=True)])
    rows = [
        Row("a step, as by default", 1e3 * median(checked), "ms"),
        Row("a step without any check", 1e3 * median(unchecked), "ms"),
        Row("ratio", ratio, "", LIMIT),
    ]
    report(f"checks of the demo model on {chosen.ranks} gloo ranks", rows, chosen.json)


if __name__ == "__main__":
    target = os.environ.get(RESULT)
    if target and "RANK" in os.environ:
        rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(target))
    else:
        main()

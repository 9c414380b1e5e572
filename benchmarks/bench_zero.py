"""A training step with ZeRO 1, 2 and 3 on four gloo ranks, against the same plan without ZeRO: time and memory.

All four models train in the same four processes, from the same weights, on the same batches, in turns; a figure is the
median of the ratios of neighbours, over the ranks' mean. They must find the same losses. Memory is what lies between
steps (parameters, gradients, moments) and the most that tensors take during a step, as torch's allocator counts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from allocations import peak_bytes
from bench_gloo import RANKS, mean_over_ranks
from report import Row, median, parser, report
from torch import Tensor
from torch.distributed.tensor import DTensor

import moec

MODEL = """
model "zero" {{
  vocab = 256; dim = {dim}; depth = 4; dtype = bf16
  layers {{
    attention = gqa(heads = 4, kv_heads = 2, rope = rope())
    moe {{ experts = 8 * swiglu({hidden}); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }}
  }}
}}
cluster "laptop" {{ device = cpu; level "process" {{ size = 4 }} }}
train {{ batch = 16; sequence = 64; optimizer = adamw(lr = 1e-5) }}
parallel {{ ep = 2; zero = {zero} }}
"""
STAGES = (0, 1, 2, 3)
SMALL, LARGE = {"dim": 128, "hidden": 256}, {"dim": 512, "hidden": 1024}
"""Widths of the model that trains, and of the one that is only drawn: draws of small ones are mostly temporary."""
STEPS, WARM_UP, MICROBATCHES = 6, 2, 2
SAME_LOSS = 1e-3
"""Largest relative difference of the losses, in bf16."""


class Contender:
    """A model at one stage, its optimizer, and what its steps take."""

    def __init__(self, job: moec.Job) -> None:
        self.job, self.model = job, job.build(seed=1)
        self.optimizer = job.optimizer(self.model)
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One training step, timed; gives the loss."""
        started = time.perf_counter()
        loss = self.job.step(self.model, tokens, labels, microbatches=MICROBATCHES)
        self.job.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.held = self.bytes_held()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)
        return float(loss)

    def bytes_held(self) -> float:
        """Bytes of masters, gradients and optimizer states on this rank."""
        states = (v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        return float(sum(_bytes(tensor) for tensor in (*self.model.parameters(), *gradients, *states)))


def _build_and_touch(job: moec.Job) -> float:
    """Draws a model; the sum makes the profiler record at least one op."""
    return float(sum(float(p.detach().to_local().sum()) for p in job.build().parameters()))


def _bytes(tensor: Tensor) -> int:
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def run_rank(result: Path) -> None:
    """Trains all stages in turns as one rank; rank 0 writes the means over the ranks."""
    torch.set_num_threads(1)
    jobs = {zero: moec.launch(moec.compile(MODEL.format(zero=zero, **SMALL)), device="cpu") for zero in STAGES}
    large = moec.launch(moec.compile(MODEL.format(zero=3, **LARGE)), device="cpu")
    with jobs[0], jobs[1], jobs[2], jobs[3], large:
        contenders = {zero: Contender(job) for zero, job in jobs.items()}
        spec, job = jobs[0].plan.spec, jobs[0]
        assert spec.train is not None
        sequence, worst = spec.train.sequence or 64, 0.0
        generator = torch.Generator().manual_seed(job.data_rank)
        for _ in range(WARM_UP + STEPS):
            windows = torch.randint(
                spec.model.vocab, (spec.train.batch // job.data_size, sequence + 1), generator=generator
            )
            losses = [each.step(windows[:, :-1], windows[:, 1:]) for each in contenders.values()]
            worst = max(worst, max(abs(loss / losses[0] - 1) for loss in losses))
        peaks = {}
        for zero, each in contenders.items():
            peaks[zero] = peak_bytes(partial(each.step, windows[:, :-1], windows[:, 1:]))
        local = sum(map(_bytes, large.build().parameters()))
        drawn = {"3": peak_bytes(partial(_build_and_touch, large)) / local}
        found = {
            "ratios": mean_over_ranks(
                {str(z): _ratio(each.seconds, contenders[0].seconds) for z, each in contenders.items()}
            ),
            "held": mean_over_ranks({str(z): each.held / contenders[0].held for z, each in contenders.items()}),
            "peaks": mean_over_ranks({str(z): peaks[z] / peaks[0] for z in STAGES}),
            "drawn": mean_over_ranks(drawn),
            "worst": worst,
        }
        if job.rank == 0:
            result.write_text(json.dumps(found))


def _ratio(seconds: list[float], others: list[float]) -> float:
    return median([a / b for a, b in zip(seconds[WARM_UP:-1], others[WARM_UP:-1], strict=True)])


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__, str(result)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = json.loads(result.read_text())
    assert found["worst"] < SAME_LOSS, f"the losses differ by {found['worst']:.1e}"
    kinds = {"ratios": "step time", "held": "masters, gradients and moments", "peaks": "most memory during a step"}
    rows = [
        Row(f"{what}, zero {zero} / zero 0", found[kind][str(zero)])
        for kind, what in kinds.items()
        for zero in (1, 2, 3)
    ]
    rows.append(Row("most memory of job.build / its parameters, zero 3", found["drawn"]["3"], limit=1.1))
    report("ZeRO at four ranks", rows, options.json)


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        run_rank(Path(sys.argv[1]))
    else:
        main()

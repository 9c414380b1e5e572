"""A training step with ZeRO 1, 2 and 3 on four gloo ranks, against the same plan without ZeRO: time and memory.

All four models train in the same four processes, from the same weights, on the same batches, in turns; a figure is the
median of the ratios of neighbours, over the ranks' mean. They must find the same losses. Memory is what lies between
steps (parameters, gradients, moments) and the most that tensors take during a step, as torch's allocator counts it.
`--peer` compares zero 0 and 1 with DeepSpeed's ZeRO-1 and MoE layers (`zero_peer.py`), where that is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from allocations import peak_bytes
from bench_gloo import RANKS, mean_over_ranks
from report import Row, median, parser, report
from torch import Tensor
from torch.distributed.tensor import DTensor
from zero_peer import MAX_NORM, Peer, missing

import moec
from moec.codegen.plan import Plan

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
WIDTHS = {"dim 128": SMALL, "dim 512": LARGE}
"""Widths of the model that trains, and of the one that is only drawn: draws of small ones are mostly temporary."""
STEPS, WARM_UP, MICROBATCHES = 6, 2, 2
PEER_STEPS = 20
RESULT, PEER_WIDTHS = "MOEC_BENCH_ZERO", "MOEC_BENCH_ZERO_PEER"
"""Set for the ranks: the file that rank 0 writes, and the name of the widths with DeepSpeed."""

SAME_LOSS = 1e-3
"""Largest relative difference of the losses, in bf16."""

SAME_LOSS_OF_PEER = 1e-2
"""DeepSpeed's balance term counts first choices only."""


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
        self.job.clip_grad_norm_(self.model, MAX_NORM)
        self.optimizer.step()
        seconds = time.perf_counter() - started
        self.held = self.bytes_held()
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.seconds.append(seconds + time.perf_counter() - started)
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
    jobs = {zero: moec.launch(_plan(zero, SMALL), device="cpu") for zero in STAGES}
    large = moec.launch(_plan(3, LARGE), device="cpu")
    with jobs[0], jobs[1], jobs[2], jobs[3], large:
        contenders = {zero: Contender(job) for zero, job in jobs.items()}
        job = jobs[0]
        worst, (tokens, labels) = _train(list(contenders.values()), job, WARM_UP + STEPS)
        seconds = {zero: list(each.seconds) for zero, each in contenders.items()}
        peaks = {}
        for zero, each in contenders.items():
            peaks[zero] = peak_bytes(partial(each.step, tokens, labels))
        local = sum(map(_bytes, large.build().parameters()))
        drawn = {"3": peak_bytes(partial(_build_and_touch, large)) / local}
        found = {
            "ratios": mean_over_ranks({str(zero): _ratio(of_stage, seconds[0]) for zero, of_stage in seconds.items()}),
            "held": mean_over_ranks({str(z): each.held / contenders[0].held for z, each in contenders.items()}),
            "peaks": mean_over_ranks({str(z): peaks[z] / peaks[0] for z in STAGES}),
            "drawn": mean_over_ranks(drawn),
            "worst": worst,
        }
        if job.rank == 0:
            result.write_text(json.dumps(found))


def run_peer_rank(result: Path, widths: Mapping[str, int]) -> None:
    """Trains moec's zero 0 and 1 and DeepSpeed's ZeRO-1 in turns as one rank; rank 0 writes the means."""
    torch.set_num_threads(1)
    jobs = {zero: moec.launch(_plan(zero, widths), device="cpu") for zero in (0, 1)}
    with jobs[0], jobs[1] as job:
        ours = {zero: Contender(job) for zero, job in jobs.items()}
        peer = Peer(job, 1, MICROBATCHES)
        worst, _ = _train([*ours.values(), peer], job, WARM_UP + PEER_STEPS)
        ratios = {str(zero): _ratio(each.seconds, peer.seconds) for zero, each in ours.items()}
        found = mean_over_ranks(ratios | {"seconds": median(peer.seconds[WARM_UP:])})
        if job.rank == 0:
            result.write_text(json.dumps(found | {"worst": worst}))


def _plan(zero: int, widths: Mapping[str, int]) -> Plan:
    return moec.compile(MODEL.format(zero=zero, **widths))


def _train(contenders: Sequence[Contender | Peer], job: moec.Job, steps: int) -> tuple[float, tuple[Tensor, Tensor]]:
    """Every contender's steps in turns on random batches: the largest difference of losses, and the last batch."""
    train, worst = job.plan.spec.train, 0.0
    assert train is not None
    generator = torch.Generator().manual_seed(job.data_rank)
    shape = (train.batch // job.data_size, (train.sequence or 64) + 1)
    for _ in range(steps):
        windows = torch.randint(job.plan.spec.model.vocab, shape, generator=generator)
        tokens, labels = windows[:, :-1], windows[:, 1:]
        losses = [each.step(tokens, labels) for each in contenders]
        worst = max(worst, max(abs(loss / losses[0] - 1) for loss in losses))
    return worst, (tokens, labels)


def _ratio(seconds: list[float], others: list[float]) -> float:
    return median([a / b for a, b in zip(seconds[WARM_UP:], others[WARM_UP:], strict=True)])


def main() -> None:
    chosen = parser(__doc__ or "")
    chosen.add_argument("--peer", action="store_true", help="compare with DeepSpeed instead")
    options = chosen.parse_args()
    if not options.peer:
        report("ZeRO at four ranks", stage_rows(_on_ranks()), options.json)
    elif reason := missing():
        print(f"skipped: {reason}")
    else:
        report("ZeRO at four ranks against DeepSpeed's ZeRO-1", peer_rows(), options.json)


def stage_rows(found: Mapping[str, Any]) -> list[Row]:
    assert found["worst"] < SAME_LOSS, f"the losses differ by {found['worst']:.1e}"
    kinds = {"ratios": "step time", "held": "masters, gradients and moments", "peaks": "most memory during a step"}
    rows = [
        Row(f"{what}, zero {zero} / zero 0", found[kind][str(zero)])
        for kind, what in kinds.items()
        for zero in (1, 2, 3)
    ]
    return [*rows, Row("most memory of job.build / its parameters, zero 3", found["drawn"]["3"], limit=1.1)]


def peer_rows() -> list[Row]:
    """Each size in processes of its own: DeepSpeed keeps groups of the job that ended."""
    rows = []
    for size in WIDTHS:
        figures = _on_ranks(size)
        assert figures["worst"] < SAME_LOSS_OF_PEER, f"the losses differ by {figures['worst']:.1e}"
        rows.append(Row(f"{size}: a step of DeepSpeed's ZeRO-1", 1e3 * figures["seconds"], "ms"))
        rows += [Row(f"{size}: zero {zero} / DeepSpeed's ZeRO-1", figures[str(zero)]) for zero in (0, 1)]
        rows.append(Row(f"{size}: largest difference of the losses", 100 * figures["worst"], "%"))
    return rows


def _on_ranks(peer: str = "") -> dict[str, Any]:
    """Runs this file as every rank, with DeepSpeed at the widths named `peer`; what rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", RESULT: str(result), PEER_WIDTHS: peer}
        subprocess.run([sys.executable, *launcher, __file__], check=True, env=os.environ | settings)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


if __name__ == "__main__":
    if target := os.environ.get(RESULT):
        if size := os.environ[PEER_WIDTHS]:
            run_peer_rank(Path(target), WIDTHS[size])
        else:
            run_rank(Path(target))
    else:
        main()

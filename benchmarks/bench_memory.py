"""A training step's memory: kept between steps and at its peak; and the peak that is predicted for random plans.

The first part is one process in bf16 with fp32 masters, with the step's time. The second runs each plan on gloo ranks
and compares the largest peak of its ranks, by torch's count of allocations, with `memory_of`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from allocations import peak_bytes
from report import Row, median, parser, report
from step_memory import kept_bytes, measured_peak, random_text

import moec
from moec.passes.cost.memory import memory_of

MODEL = """
model "masters" {{
  vocab = 256; dim = {dim}; depth = 3; dtype = {dtype}
  layers {{
    attention = gqa(heads = 4, kv_heads = 2, rope = rope())
    moe {{ experts = 8 * swiglu({hidden}); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }}
  }}
  layers 0 {{ ffn = swiglu({ffn}) }}
}}
cluster "laptop" {{ device = cpu; level "process" {{ size = 1 }} }}
train {{ batch = {batch}; sequence = {sequence}; optimizer = adamw(lr = 1e-4) }}
"""
SIZES = {
    "demo": {"dim": 64, "hidden": 128, "batch": 16, "sequence": 128, "steps": 40},
    "large": {"dim": 512, "hidden": 1024, "batch": 4, "sequence": 256, "steps": 12},
}
MB = 1e6
LIMIT = 10
"""Per cent that a prediction may be off."""

SECONDS = 180
RANK_OF = "MOEC_BENCH_MEMORY"
"""Set for the ranks of a plan: its number, and where they write."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", default="bf16")
    options.add_argument("--plans", type=int, default=20)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in SIZES for row in measure(name, chosen.dtype)]
    rows += predicted_over_measured(chosen.plans)
    report(f"a step in {chosen.dtype}, one thread; peaks of random plans", rows, chosen.json)


def measure(name: str, dtype: str) -> list[Row]:
    size = SIZES[name]
    text = MODEL.format(**size, ffn=2 * size["hidden"], dtype=dtype)
    batch, sequence = size["batch"], size["sequence"]
    with moec.launch(moec.compile(text), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        tokens, labels = torch.randint(256, (2, batch, sequence), generator=torch.Generator().manual_seed(0))

        def step() -> float:
            started = time.process_time()
            job.step(model, tokens, labels)
            optimizer.step()
            optimizer.zero_grad()
            return time.process_time() - started

        for _ in range(3):
            step()
        seconds = [step() for _ in range(size["steps"])]
        kept, added = kept_bytes(), peak_bytes(step)
        elements = sum(parameter.numel() for parameter in model.parameters())
    return [
        Row(f"{name}: a step", 1e3 * median(seconds), "ms"),
        Row(f"{name}: kept between steps, a parameter", kept / elements, "bytes"),
        Row(f"{name}: at most, with what a step adds", (kept + added) / MB, "MB"),
    ]


def predicted_over_measured(count: int) -> list[Row]:
    """The ratio of each random plan's predicted peak to the measured one, and the largest deviation."""
    rows = []
    for number in range(count):
        plan = moec.compile(random_text(number))
        predicted, measured = memory_of(plan.program, plan.spec).peak, max(peaks_of_ranks(number, plan.world_size))
        what = f"plan {number}, {plan.world_size} ranks: predicted / measured, {predicted.event}"
        rows.append(Row(what, predicted.bytes.total / measured))
    worst = max(abs(row.value - 1) for row in rows)
    return [*rows, Row("the largest deviation", 100 * worst, "%", LIMIT)]


def peaks_of_ranks(number: int, ranks: int) -> list[int]:
    """The measured peak of every rank, each a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", RANK_OF: f"{number} {folder}"}
        subprocess.run(
            [sys.executable, *launcher, __file__], env=environment, check=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=SECONDS,
        )  # fmt: skip
        return [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]


def be_a_rank(number: int, folder: Path) -> None:
    peak = measured_peak(moec.compile(random_text(number)))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(peak))


if __name__ == "__main__":
    if chosen := os.environ.get(RANK_OF):
        number, folder = chosen.split(" ", 1)
        be_a_rank(int(number), Path(folder))
    else:
        main()

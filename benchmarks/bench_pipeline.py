"""Pipelines on gloo ranks: the bubble, the cost of a backward pass in two parts, and memory by stage.

Two cores compute no four stages at once, so the stages of the first part sleep: a step should take as long as the cost
model says of its orders. The second part compares the CPU time of both parts with that of a whole backward pass. The
third compares each rank's peak, by torch's count of allocations, with `memory_of_ranks`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Row, median, parser, report
from step_memory import measured_peak

import moec
from moec.codegen.plan import Plan
from moec.grammar.stated import STAGES_OF_RANK
from moec.passes.cost.memory import memory_of_ranks
from moec.passes.cost.pipeline_time import StageSeconds
from moec.passes.cost.step_time import pipeline_time
from moec.passes.ir.order import Action
from moec.passes.place.pipeline_tables import TABLES
from moec.runtime.job.stage_passes import StagePasses

FILE = """
model "pipeline" {{
  vocab = 256; dim = {dim}; depth = {depth}; dtype = {dtype}; embedding = tokens(tied = {tied})
  layers {{
    attention = gqa(heads = 4, kv_heads = 2, rope = rope())
    moe {{ experts = {experts} * swiglu({hidden}); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }}
  }}
}}
cluster "laptop" {{ device = cpu; level "process" {{ size = {ranks} }} }}
train {{ batch = {batch}; sequence = {sequence}; optimizer = adamw(lr = 1e-4) }}
parallel {{ pp = {pp}; schedule = {schedule}; microbatches = {microbatches}; ep = {ep}; zero = {zero}{more} }}
"""
SMALL: dict[str, Any] = {
    "dim": 16, "depth": 8, "dtype": "fp32", "tied": "false", "experts": 4, "hidden": 16, "ranks": 4, "batch": 8,
    "sequence": 8, "pp": 4, "microbatches": 8, "ep": 1, "zero": 0, "more": "",
}  # fmt: skip
LARGE = SMALL | {"dim": 256, "depth": 4, "experts": 8, "hidden": 512, "sequence": 512, "pp": 2, "microbatches": 4}
SCHEDULES = {word: STAGES_OF_RANK[word].default for word in TABLES}
"""The schedules, with the stages of a rank."""
NAP, LIMIT = 0.08, 5
"""Seconds that a stage sleeps in forward, and in each part of backward; per cent that a step may be longer."""
STEPS, REPEATS, PLANS = 4, 3, 8
LIMIT_OF_PARTS, LIMIT_OF_MEMORY = 1.1, 10
PART = "MOEC_BENCH_PIPELINE"
"""Set for the ranks: what to measure, and the folder where each rank writes."""


def text(schedule: str, **options: Any) -> str:
    return FILE.format(schedule=schedule, **(SMALL | options))


def batch_of(job: moec.Job) -> list[torch.Tensor]:
    train = job.plan.spec.train
    assert train is not None
    shape = (2, train.batch, train.sequence)
    whole = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    return [part.chunk(job.data_size)[job.data_rank].clone() for part in whole]


# ---- the bubble ----------------------------------------------------------------------------------------


NAPS = StageSeconds(forward=NAP, backward=2 * NAP, weights=NAP)
"""How long a stage sleeps in its passes."""


@contextmanager
def sleeping(seconds: StageSeconds) -> Iterator[None]:
    """Inside the block passes of stages sleep, for so long less what they compute."""
    take = StagePasses.take

    def take_and_sleep(self: StagePasses, action: Action) -> None:
        started = time.process_time()
        take(self, action)
        if action.kind in ("forward", "backward", "inputs", "weights"):
            time.sleep(max(0.0, seconds.of(action) - (time.process_time() - started)))

    StagePasses.take = take_and_sleep  # type: ignore[method-assign]
    try:
        yield
    finally:
        StagePasses.take = take  # type: ignore[method-assign]


def sleep_as_a_rank() -> dict[str, float]:
    """For each schedule the shortest step's seconds over those of its orders."""
    ratios = {}
    for schedule, virtual in SCHEDULES.items():
        plan = moec.compile(text(schedule))
        with moec.launch(plan, device="cpu") as job, sleeping(NAPS):
            model, batch = job.build(), batch_of(job)
            steps = []
            for _ in range(STEPS):
                dist.barrier()
                started = time.perf_counter()
                job.step(model, *batch)
                steps.append(time.perf_counter() - started)
                job.clip_grad_norm_(model, 1.0)
                model.zero_grad()
            ratios[schedule] = min(steps) / max(pipeline_time(plan.program, [NAPS] * virtual * 4).ends)
    return ratios


# ---- a backward pass in two parts ----------------------------------------------------------------------


def count_as_a_rank(dtype: str, ep: int) -> dict[str, float]:
    """The CPU time of both parts over that of a whole backward pass of rank 0's stage, and the exchanges of rows of
    both."""
    seconds: dict[str, list[float]] = defaultdict(list)
    exchanges: dict[str, int] = {}
    take, exchange = StagePasses.take, dist.all_to_all_single
    calls = 0

    def timed(self: StagePasses, action: Action) -> None:
        started = time.process_time()
        take(self, action)
        seconds[action.kind].append(time.process_time() - started)

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return exchange(*arguments, **options)

    StagePasses.take = timed  # type: ignore[method-assign]
    dist.all_to_all_single = counted
    ratios = []
    for _ in range(REPEATS):
        fastest: dict[str, float] = {}
        for schedule in ("one_f_one_b", "zero_bubble"):
            options = LARGE | {"dtype": dtype, "ep": ep, "ranks": 2 * ep, "batch": 8 * ep}
            with moec.launch(moec.compile(text(schedule, **options)), device="cpu") as job:
                model, batch = job.build(), batch_of(job)
                for _ in range(2):
                    seconds.clear()
                    calls = 0
                    job.step(model, *batch)
                    model.zero_grad()
                exchanges[schedule] = calls
                fastest |= {kind: median(found) for kind, found in seconds.items()}
        ratios.append((fastest["inputs"] + fastest["weights"]) / fastest["backward"])
    return {"ratio": median(ratios)} | {f"exchanges of {schedule}": n for schedule, n in exchanges.items()}


# ---- memory --------------------------------------------------------------------------------------------


def random_text(number: int) -> str:
    """A pipeline whose ranks take tens of MB."""
    draw = random.Random(f"pipeline/{number}")
    schedule = list(SCHEDULES)[number % len(SCHEDULES)]
    dp, pp = draw.choice((1, 1, 2)), draw.choice((2, 2, 4))
    microbatches = 2 * pp
    return text(
        schedule,
        dim=draw.choice((128, 192)),
        depth=2 * pp,
        dtype=draw.choice(("fp32", "bf16")),
        tied=draw.choice(("true", "false")),
        experts=8,
        hidden=draw.choice((128, 256)),
        ranks=dp * pp,
        batch=dp * microbatches * 2,
        sequence=draw.choice((64, 128, 192)),
        pp=pp,
        microbatches=microbatches,
        ep=draw.choice((1, dp)),
        zero=draw.choice((0, 1, 2, 3)) if dp > 1 else 0,
        more=draw.choice(("", "", "; recompute = experts", "; recompute = layer")),
    )


def memory_rows(count: int) -> list[Row]:
    """The ratio of predicted to measured peaks, of each plan's worst rank; and the largest deviation of any rank."""
    rows, worst = [], 0.0
    for number in range(count):
        plan = moec.compile(random_text(number))
        measured = on_ranks(f"memory {number}", plan.world_size)
        predicted = [memory.peak.bytes.total for memory in memory_of_ranks(plan.program, plan.spec)]
        ratios = []
        for rank, bytes_of_stage in enumerate(predicted):
            ranks = range(rank * plan.stage_size, (rank + 1) * plan.stage_size)
            ratios.append(bytes_of_stage / max(measured[r]["peak"] for r in ranks))
        worst = max(worst, *(abs(ratio - 1) for ratio in ratios))
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        what = f"plan {number}, {plan.program.schedule}, {plan.world_size} ranks: predicted / measured ({shown})"
        rows.append(Row(what, max(ratios, key=lambda ratio: abs(ratio - 1))))
    return [*rows, Row("memory: the largest deviation of a rank", 100 * worst, "%", LIMIT_OF_MEMORY)]


# ---- all -----------------------------------------------------------------------------------------------


def on_ranks(part: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank has written."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", PART: f"{part}|{folder}"}
        subprocess.run(
            [sys.executable, *launcher, __file__], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=900
        )
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def be_a_rank(part: str, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, float]
    match part.split():
        case ["bubble"]:
            found = sleep_as_a_rank()
        case ["parts", dtype, ep]:
            found = count_as_a_rank(dtype, int(ep))
        case ["memory", number]:
            plan: Plan = moec.compile(random_text(int(number)))
            found = {"peak": measured_peak(plan)}
        case _:
            raise AssertionError(part)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--plans", type=int, default=PLANS)
    options.add_argument("--parts", nargs="*", default=["bubble", "parts", "memory"])
    chosen = options.parse_args()
    rows = []
    if "bubble" in chosen.parts:
        ratios = on_ranks("bubble", 4)[0]
        rows += [
            Row(f"{word}: longer than its orders", 100 * (ratio - 1), "%", LIMIT) for word, ratio in ratios.items()
        ]
    if "parts" in chosen.parts:
        for dtype, ep in (("fp32", 1), ("fp32", 2), ("bf16", 1)):
            found = on_ranks(f"parts {dtype} {ep}", 2 * ep)[0]
            what = f"{dtype}, ep {ep}: both parts of backward over a whole pass"
            rows.append(Row(what, found["ratio"], "", LIMIT_OF_PARTS))
            if ep > 1:
                more = found["exchanges of zero_bubble"] / found["exchanges of one_f_one_b"]
                rows.append(Row(f"{dtype}, ep {ep}: exchanges of rows over 1F1B's", more, "", 1))
    if "memory" in chosen.parts:
        rows += memory_rows(chosen.plans)
    report("pipelines on gloo ranks", rows, chosen.json)


if __name__ == "__main__":
    if given := os.environ.get(PART):
        part, written = given.split("|", 1)
        be_a_rank(part, Path(written))
    else:
        main()

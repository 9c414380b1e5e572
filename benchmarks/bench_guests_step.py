"""A training step with guests on gloo ranks, against the same plan without `adapt`: where one expert has half of all
rows, and where loads are equal.

Both models train in the same processes, from the same weights, on the same batches, in turns; a figure is the median of
the ratios of neighbours, over the ranks' mean, once guests are chosen. They must find the same losses. The processor
time of the busiest rank is what a step would take where every rank has a core of its own.
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
import torch.distributed as dist
from report import Row, median, parser, report

import moec

MODEL = """
model "busy" {{
  vocab = 256; dim = 512; depth = 2; dtype = fp32
  layers {{
    attention = gqa(heads = 4, kv_heads = 2, rope = rope())
    moe {{ experts = 8 * swiglu(1024); gate = topk(2, score = sigmoid, normalize = true, bias = online(1e-9)) }}
  }}
}}
cluster "laptop" {{ device = cpu; level "process" {{ size = {ranks}; bandwidth = 2GB/s }} }}
train {{ batch = {batch}; sequence = 256; optimizer = adamw(lr = 1e-5) }}
parallel {{ ep = {ranks} }}
{adapt}
"""
STEPS, WARM_UP, SEQUENCES = 20, 14, 8
"""Guests are chosen after ten steps, and used from the twelfth on."""

BIASES = {"one expert has half of all rows": (3, 100.0), "equal loads": (3, 0.0)}
LIMITS = {"one expert has half of all rows": 0.7, "equal loads": 1.03}
RESULT, NAME = "MOEC_BENCH_GUESTS", "MOEC_BENCH_GUESTS_NAME"
SAME_LOSS = 1e-3
"""Sums in another order flip a choice of experts now and then."""


class Contender:
    """A model, its optimizer, and the seconds of its steps."""

    def __init__(self, job: moec.Job, name: str) -> None:
        self.job, self.model = job, job.build(seed=1)
        self.optimizer, self.seconds, self.busy = job.optimizer(self.model), list[float](), list[float]()
        expert, bias = BIASES[name]
        with torch.no_grad():
            for layer in self.model.layers:
                layer.moe.gate.bias[expert] = bias

    def step(self, tokens: torch.Tensor) -> float:
        started, used = time.perf_counter(), time.process_time()
        loss = self.job.step(self.model, tokens[:, :-1], tokens[:, 1:])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)
        self.busy.append(time.process_time() - used)
        return float(loss)


def run_rank(result: Path, name: str) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    plain, adaptive = (
        moec.launch(moec.compile(MODEL.format(ranks=ranks, batch=SEQUENCES * ranks, adapt=adapt)), device="cpu")
        for adapt in ("", f"adapt {{ placement = replicate({ranks}) }}")
    )
    with plain, adaptive:
        contenders = [Contender(plain, name), Contender(adaptive, name)]
        generator, worst = torch.Generator().manual_seed(plain.data_rank), 0.0
        for _ in range(WARM_UP + STEPS):
            tokens = torch.randint(256, (SEQUENCES, 257), generator=generator)
            one, other = (each.step(tokens) for each in contenders)
            worst = max(worst, abs(one / other - 1))
        pairs = zip(contenders[1].seconds[WARM_UP:], contenders[0].seconds[WARM_UP:], strict=True)
        found = {"ratio": of_all_ranks(median([a / b for a, b in pairs]))}
        adaptive_busy, plain_busy = (busiest(each.busy[WARM_UP:]) for each in reversed(contenders))
        found["busiest"] = median([a / b for a, b in zip(adaptive_busy, plain_busy, strict=True)])
        guests = [layer.guests for layer in contenders[1].model.layers]
        number = sum(int((each.slots[:, each.own :] >= 0).sum()) for each in guests if each is not None)
        if plain.rank == 0:
            result.write_text(json.dumps(found | {"worst": worst, "guests": number / len(guests)}))


def of_all_ranks(figure: float) -> float:
    """The mean over the ranks."""
    total = torch.tensor(figure, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def busiest(seconds: list[float]) -> list[float]:
    """Of each step, those of the rank with most."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [float(each) for each in most]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    rows = []
    for ranks in (2, 4):
        for name in BIASES:
            found = on_ranks(ranks, name)
            assert found["worst"] < SAME_LOSS, f"the losses differ by {found['worst']:.1e}"
            what = f"{ranks} ranks, {name}: with guests / without ({found['guests']:g} guests a layer)"
            rows.append(Row(what, found["ratio"], limit=LIMITS[name]))
            rows.append(Row("  processor time of the busiest rank", found["busiest"], limit=LIMITS[name]))
    report("Guests on gloo ranks", rows, options.json)


def on_ranks(ranks: int, name: str) -> dict[str, float]:
    """Runs this file as every rank; what rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {RESULT: str(result), NAME: name, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launcher, __file__], check=True, env=environment)
        found: dict[str, float] = json.loads(result.read_text())
        return found


if __name__ == "__main__":
    if RESULT in os.environ:
        run_rank(Path(os.environ[RESULT]), os.environ[NAME])
    else:
        main()

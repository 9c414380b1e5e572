"""`moec tune` on this machine's device; `tests/kernels/interpreted_tuning.py` tests it without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moec
from moec.codegen.kernels.tiles import KERNELS
from moec.codegen.plan import Plan
from moec.passes.ir.ops import MixtureMlp
from moec.runtime.backends.triton.triton_tiles import device_name, ways_on
from moec.runtime.tune.tuning import bench_for, tune

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or AMD device")

TEXT = """
device "{name}" {{ kind = {kind}; memory = 16GB; bandwidth = 1TB/s; peak {{ bf16 = 100TFLOPS }} }}
model "small" {{
  vocab = 64
  dim   = 512
  depth = 1
  dtype = bf16
  layers {{
    attention = mha(heads = 4)
    moe {{ experts = 8 * swiglu(1024); gate = topk(2, normalize = true) }}
  }}
}}
cluster "one" {{ device = "{name}"; level "gpu" {{ size = 1 }} }}
train {{ batch = 8; sequence = 512; optimizer = adamw(lr = 1e-2) }}
"""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def plan(device: torch.device) -> Plan:
    return moec.compile(TEXT.format(name=device_name(device), kind="hip" if torch.version.hip else "cuda"))


def test_a_plan_is_tuned_on_the_device_that_is_here(plan: Plan, device: torch.device, tmp_path: Path) -> None:
    assert bench_for(plan).shared >= 48 * 1024
    tuning = tune(plan, max_tiles=3)
    (found,) = tuning.results
    assert all(found.tried(kernel) > 1 for kernel in KERNELS)
    assert found.wrong == 0
    assert 0 < found.best_ms <= found.default_ms
    loaded = moec.load(tuning.plan.save(tmp_path / "small.plan"))
    block = next(block for block in loaded.program.blocks if any(isinstance(op, MixtureMlp) for op in block.ops))
    op = next(op for op in block.ops if isinstance(op, MixtureMlp))
    assert ways_on(loaded, block, op, device) == str(found.best)


def test_a_tuned_plan_trains(plan: Plan) -> None:
    tuned = tune(plan, max_tiles=1).plan
    with moec.launch(tuned, device="cuda") as job:
        model = job.build()
        tokens = torch.randint(64, (8, 512), device="cuda")
        losses = [float(job.step(model, tokens, tokens)) for _ in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)

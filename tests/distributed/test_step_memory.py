"""The peak of a training step that the model of memory predicts, against torch's count of allocations on real ranks."""

from __future__ import annotations

import pytest
from step_memory import PLAN, measured_peak
from support.ranks.gloo_pool import GlooPool

import moec
from moec.passes.cost.memory import memory_of

SIZES = {
    "vocab": 512, "dim": 128, "depth": 3, "dtype": "fp32", "model": "", "kv_heads": 4, "experts": 4,
    "k": 2, "expert": "swiglu(256)", "beside": "", "ffn": 256, "sequence": 64, "state": "fp32",
    "optimizer": "adamw(lr = 1e-4)",
    "tp": 1, "ep": 1, "parallel": "",
}  # fmt: skip
PLANS = {
    "bf16 on one rank": {"ranks": 1, "batch": 8, "dtype": "bf16"},
    "states in bf16": {"ranks": 1, "batch": 4, "sequence": 16, "state": "bf16"},
    "decay of sgd": {"ranks": 1, "batch": 4, "sequence": 16, "optimizer": "sgd(lr = 1e-3, weight_decay = 0.1)"},
    "lion": {"ranks": 1, "batch": 4, "sequence": 16, "optimizer": "lion(lr = 1e-4)"},
    "lion with states in bf16": {
        "ranks": 1,
        "batch": 4,
        "sequence": 16,
        "optimizer": "lion(lr = 1e-4)",
        "state": "bf16",
    },
    "adafactor": {"ranks": 1, "batch": 4, "sequence": 16, "optimizer": "adafactor(lr = 1e-3)"},
    "muon with states in bf16": {
        "ranks": 1,
        "batch": 4,
        "sequence": 16,
        "optimizer": "muon(lr = 1e-3)",
        "state": "bf16",
    },
    "muon on two ranks that share matrices": {
        "ranks": 2,
        "tp": 2,
        "ep": 2,
        "batch": 4,
        "sequence": 16,
        "optimizer": "muon(lr = 1e-3)",
    },
    "experts on two ranks": {"ranks": 2, "ep": 2, "batch": 4},
    "tensors and experts on two ranks": {"ranks": 2, "tp": 2, "ep": 2, "batch": 8, "dtype": "bf16"},
}


def peak_of_rank(text: str) -> int:
    return measured_peak(moec.compile(text))


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_the_predicted_peak_is_within_a_tenth_of_the_measured_one(gloo: GlooPool, options: dict[str, object]) -> None:
    text = PLAN.format(**SIZES | options)
    plan = moec.compile(text)
    predicted = memory_of(plan.program, plan.spec).peak.bytes.total
    assert predicted == pytest.approx(max(gloo.run(plan.world_size, peak_of_rank, text)), rel=0.1)

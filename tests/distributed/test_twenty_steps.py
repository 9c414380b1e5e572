"""Twenty random plans on 2 to 8 gloo ranks train for twenty steps as the unsharded model does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.checkpoints import assembled
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import require_learning, train_as_rank, unsharded

STEPS = 20
MODEL = {"batch": 16, "optimizer": "adamw(lr = 3e-3)"}
LOSSES, NORMS, WEIGHTS = 2e-5, 2e-4, 2e-3
"""Bounds in fp32: of losses, of gradient norms relative to them, of weights relative to the largest of their tensor."""

RECOMPUTE = ("", "experts", "layer", "layers 1 { recompute = experts } layers 2 { recompute = layer }")


def drawn(number: int) -> dict[str, Any]:
    """Degrees on 2 to 8 ranks. Each stage of ZeRO comes in turn, each way of recomputation too; from 12 on, `cp` and
    `etp` too, on at least 4 ranks."""
    generator = random.Random(number)
    ranks = (2, 4, 8, 4, 2, 8)[number % 6]
    tp = generator.choice([size for size in (1, 2, 4) if ranks % size == 0])
    cp = etp = 1
    if number >= 12:
        ranks, tp = max(ranks, 4), min(tp, 2)
        cp, etp = 2, generator.choice([2, 4])
    ep = generator.choice([size for size in (1, 2, 4, 8) if ranks % (size * etp) == 0])
    microbatches = generator.choice([size for size in (1, 2, 4) if MODEL["batch"] % (size * ranks // (cp * tp)) == 0])
    return {
        "ranks": ranks, "cp": cp, "tp": tp, "ep": ep, "etp": etp, "zero": number % 4,
        "recompute": RECOMPUTE[number // 3 % 4],
        "microbatches": microbatches,
    }  # fmt: skip


PLANS = [drawn(number) for number in range(20)]
FAST = 15
"""The one of `make test`, for eight steps."""


def names(degrees: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in degrees.items() if value)


@pytest.mark.parametrize(
    ("degrees", "steps"),
    [
        *(pytest.param(plan, STEPS, id=names(plan), marks=pytest.mark.slow) for plan in PLANS),
        pytest.param(PLANS[FAST], 8, id=f"{names(PLANS[FAST])}, eight steps"),
    ],
)
def test_twenty_steps_under_any_degrees_are_those_of_the_unsharded_model(
    gloo: GlooPool, degrees: dict[str, Any], steps: int
) -> None:
    plan = moe_plan(**MODEL, **degrees)
    results = gloo.run(plan.world_size, train_as_rank, plan, steps, timeout=240.0)
    expected = unsharded(steps, **MODEL)
    require_learning(expected["losses"])
    worst = {"loss": 0.0, "norm": 0.0}
    for result in results:
        for kind, figures in (("loss", "losses"), ("norm", "norms")):
            pairs = zip(result[figures], expected[figures], strict=True)
            relative = 1.0 if kind == "loss" else min(expected["norms"])
            worst[kind] = max(worst[kind], *(abs(found - wanted) / relative for found, wanted in pairs))
    whole = assembled(plan, [result["parameters"] for result in results])
    assert whole.keys() == expected["parameters"].keys()
    off = {
        name: float((value - expected["parameters"][name]).abs().max() / expected["parameters"][name].abs().max())
        for name, value in whole.items()
    }
    farthest = max(off, key=lambda name: off[name])
    print(f"{names(degrees)}: loss {worst['loss']:.1e}, norm {worst['norm']:.1e}, {farthest} {off[farthest]:.1e}")
    assert worst["loss"] < LOSSES
    assert worst["norm"] < NORMS
    assert off[farthest] < WEIGHTS, farthest
    assert all(torch.isfinite(value).all() for value in whole.values())

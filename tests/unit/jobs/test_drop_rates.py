"""`job.drop_rates`: of the choices that tokens made, the fraction that a capacity dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.verified import require_equal
from support.wrong_plans import change_op
from torch import Tensor

import moec
from moec.runtime.verify.verification import verify

TOKENS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
ROUTES = torch.stack([torch.arange(64) % 4, torch.full((64,), -1)], -1).view(8, 8, 1, 2)
"""Every token goes to one of four experts, in turn; its second choice is none."""
EVERY = "capacity = factor(100)"


def rates(tmp_path: Path | None = None, **options: Any) -> tuple[float, Tensor]:
    """The drop rate of the one mixture of a model, after a step, and the rows of its experts."""
    given = {"routes": ROUTES} if "replay" in options.get("optimizer", "") else {}
    options = {"balance": "[]", "depth": 2, "ranks": 1, "ep": 1} | options
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(20.0 if "gate" in name else 1.0)
        loss = job.step(model, TOKENS, TOKENS, **given)
        (rate,), (load,) = job.drop_rates(model).values(), job.expert_loads(model).values()
        if tmp_path is not None:
            with job.metrics(tmp_path / "log.jsonl") as metrics:
                record = metrics.step(model, loss)
            assert record is not None
            assert record["drop_rate"] == {1: rate}
    return rate, load


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "gshard"},
        {"gate": "dselect_k(2, gamma = 0.01)"},
        {"gate": "expert_choice(0.5)"},
        {"gate": "expert_choice(3)"},
        {"gate": "base"},
        {"gate": "soft(16)"},
        {"gate": "dense"},
        {"gate": "topk(2)", "optimizer": "sgd(lr = 0.1); replay = true"},
    ],
)
def test_no_choice_is_dropped_without_a_capacity(options: dict[str, str]) -> None:
    assert rates(**options)[0] == 0.0


COUNTED = [
    {"gate": "topk(2)"},
    {"gate": "gshard"},
    {"gate": "dselect_k(2, gamma = 0.01)"},
    {"gate": "topology(2)"},
    {"gate": "topk(2)", "expert": "gelu(3)", "experts": 8, "model": "embedding = tokens(padding = 3)"},
    {"gate": "gshard", "model": "embedding = tokens(padding = 3, separator = 4)"},
    {"gate": "topk(2)", "optimizer": "sgd(lr = 0.1); replay = true"},
]


@pytest.mark.parametrize("options", COUNTED)
def test_choices_that_no_token_made_are_not_counted(options: dict[str, Any], tmp_path: Path) -> None:
    """The rows under a capacity that drops nothing are the choices that were made."""
    none, made = rates(tmp_path, beside=EVERY, **options)
    rate, kept = rates(tmp_path, beside="capacity = factor(0.5)", **options)
    assert none == 0.0
    assert 0 < rate < 1
    assert rate == pytest.approx(1 - int(kept.sum()) / int(made.sum()), abs=1e-12)


def test_a_plan_that_counts_choices_of_padding_is_refused() -> None:
    plan = moe_plan(
        ranks=2, ep=2, model="embedding = tokens(padding = given)", beside="capacity = factor(0.7)",
        optimizer="sgd(lr = 0.1); replay = true",
    )  # fmt: skip
    require_equal(plan, float32=False)
    wrong = change_op(plan, "layers[1..2]", "made", operands=("e",))  # not masked
    assert "the choices before a capacity drops any of layers.1" in str(verify(wrong, float32=False))


def test_a_choice_that_goes_to_another_expert_is_not_dropped() -> None:
    rate, load = rates(gate="topk(2)", beside="capacity = factor(0.5); overflow = reroute")
    assert rate == pytest.approx(1 - int(load.sum()) / (2 * TOKENS.numel()), abs=1e-12)
    assert rates(gate="topk(2)", beside="capacity = factor(4.0); overflow = reroute")[0] == 0.0

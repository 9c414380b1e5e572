"""`switch_loss(…, over = model)`: plans equal the unsharded model; what layers must share; faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import layer_text, moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.wrong_plans import change_op

from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

TERM = "[switch_loss(0.5, over = model)]"
PADDED = "embedding = tokens(padding = 3)"
PLANS: list[dict[str, Any]] = [
    {"ep": 2, "tp": 2, "beside": "group = batch", "recompute": "layer", "microbatches": 2},
    {"ep": 4, "zero": 3, "model": PADDED, "beside": "group = sequence"},
    {"ep": 2, "zero": 1, "beside": "group = rank", "model": PADDED, "recompute": "experts"},
    {"ep": 2, "tp": 4, "sequence_parallel": False, "beside": "group = batch; capacity = factor(0.7)"},
    {"ep": 2, "gate": "topk(2, score = sigmoid, bias = online(0.01))", "optimizer": "adamw(); replay = true"},
    {"ep": 2, "beside": "group = batch", "model": "embedding = tokens(separator = 3)"},
    {"ranks": 8, "ep": 4, "layers": ["", "ffn = gelu(8)", "moe { gate = topk(3) }", "moe { balance = [z_loss(0.1)] }"]},
]


@pytest.mark.parametrize("place", some(range(len(PLANS)), [0, 1, 6]))
def test_plans_equal_the_unsharded_model(place: int) -> None:
    require_equal(moe_plan(**{"balance": TERM, "batch": 16, **PLANS[place]}))


def aux_loss(**options: Any) -> float:
    model = reference(moe_spec(ranks=1, ep=1, **options), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(20 if ".gate." in name else 1)
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    return float(model(tokens).aux_loss.detach())


def test_of_one_layer_it_is_the_term_of_the_layer_and_of_two_it_is_not_their_sum() -> None:
    for group in ("batch", "sequence"):
        how = {"balance": "[switch_loss(1.0, over = {})]", "beside": f"group = {group}"}
        one, two = (
            [aux_loss(**{**how, "balance": how["balance"].format(over)}, depth=depth) for depth in (2, 3)]
            for over in ("model", "layer")
        )
        assert one[0] == pytest.approx(two[0], rel=1e-12)
        assert one[0] > 1.02
        assert two[1] > one[1] + 0.5


def test_a_plan_that_counts_another_group_is_refused() -> None:
    plan = moe_plan(ranks=2, ep=2, balance=TERM, beside="group = sequence")
    assert verify(plan, float32=False).ok
    for value, update in (
        ("pooled", {"operands": ("probabilities_2", "probabilities_2")}),
        ("pooled_balance", {"weights": (0.5,)}),
    ):
        assert not verify(change_op(plan, "forward", value, **update), float32=False).ok


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (["", "moe { balance = [switch_loss(0.4, over = model)] }"], "0.4"),
        (["", "moe { experts = 4 * gelu(8) }"], "4 * gelu(8)"),
        (["", "moe { group = batch }"], "batch"),
        (["moe { balance = [switch_loss(0.5, over = model), switch_loss(0.5, over = model)] }"], "switch_loss"),
    ],
)
def test_layers_that_do_not_share_the_term_are_refused(layers: list[str], said: str) -> None:
    text = moe_text(balance=TERM, layers=layers)
    (found,) = load_text(text).diagnostics
    assert found.code == "MOE0372"
    assert found.span is not None
    assert text[found.span.start : found.span.end].startswith(said)
    assert len(found.labels) == 1
    assert found.help


MOA = "moa(heads = 4, experts = 4, gate = topk(2), balance = [switch_loss(0.1, over = model)])"


@pytest.mark.parametrize(
    "text",
    [
        layer_text(balance=TERM),
        moe_text(attention=MOA),
        moe_text(balance=TERM, model="embedding = tokens(separator = 3)"),
    ],
)
def test_where_there_are_no_tokens_of_all_layers_it_is_refused(text: str) -> None:
    with pytest.raises(DiagnosticError) as refused:
        compile_source(load_text(text).unwrap())
    assert {(one.code, "`over = model`" in one.message) for one in refused.value.diagnostics} == {("MOE0202", True)}

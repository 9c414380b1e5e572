"""Plans whose gate has another option than the file says are found."""

from __future__ import annotations

from typing import Any

import pytest
from support.plans import BODY, layer_plan, moe_plan, moe_text
from support.wrong_plans import change_op, change_sums

from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir.ops.gating.gate_ops import Route
from moec.runtime.verify.verification import verify

GATE = "topk(2, score = sigmoid, scale = 2.5, groups = 4, keep_groups = 2)"
FAULTS: dict[str, dict[str, Any]] = {
    "another scale": {"scale": 2.4},
    "more groups kept": {"keep_groups": 3},
    "no groups": {"groups": 1, "keep_groups": 1},
    "another score of groups": {"group_score": "max"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_option_of_route_is_found(fault: str) -> None:
    plan = moe_plan(ep=2, tp=2, gate=GATE)
    (route,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == "route")
    assert not verify(change_op(plan, BODY, route.results[0].name, **FAULTS[fault]), float32=False).ok


def test_a_learned_bias_is_a_parameter_and_no_state() -> None:
    plan = moe_plan(ep=2, tp=2, zero=1, gate="topk(2, order = after, bias = learned)", dtype="bf16")
    names = [f"layers.{layer}.moe.gate.bias" for layer in (1, 2)]
    assert not plan.states
    for name in names:
        bias = plan.parameters[name]
        assert (bias.shape, bias.dtype, bias.init.kind, bias.decays) == ((8,), "bf16", "zeros", False)
        assert not bias.layout.axes  # a whole copy on every rank, whose gradients are summed over all of them
        assert set(bias.sum_over) == {"dp", "tp"}
    online = moe_plan(ep=2, gate="topk(2, bias = online(0.01))")
    assert list(online.states) == names
    assert not set(names) & set(online.parameters)


def test_a_gradient_of_a_learned_bias_that_is_not_summed_over_tp_is_found() -> None:
    plan = moe_plan(ep=2, tp=2, gate="topk(2, order = after, bias = learned)")
    assert verify(plan, float32=False).ok
    assert not verify(change_sums(plan, "moe.gate.bias", ("dp",)), float32=False).ok


NOISE = "topk(2, noise = 0.5)"
WRONG_NOISE: dict[str, tuple[str, dict[str, Any]]] = {
    "another stream": ("normal_noise", {"stream": 0}),
    "more noise": ("add_noise", {"std": 0.51}),
}


@pytest.mark.parametrize("fault", WRONG_NOISE)
def test_wrong_noise_is_found(fault: str) -> None:
    mnemonic, changes = WRONG_NOISE[fault]
    plan = moe_plan(ep=2, tp=2, gate=NOISE)
    (op,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == mnemonic)
    assert not verify(change_op(plan, BODY, op.results[0].name, **changes), float32=False).ok


@pytest.mark.parametrize(
    ("matters", "beside"),
    [
        (False, {"balance": "[switch_loss(0.1), sequence_loss(0.1)]"}),
        (True, {"balance": "[gshard_loss(0.1)]"}),
        (True, {"beside": "capacity = factor(0.5)"}),
    ],
)
def test_all_experts_are_sorted_where_the_order_of_choices_matters(matters: bool, beside: dict[str, str]) -> None:
    plan = moe_plan(ep=2, tp=2, gate="dense", **beside)
    (chosen,) = {op.mnemonic for op in plan.program.block(BODY).ops if op.mnemonic == "every_expert"} or {"route"}
    (k,) = {op.k for op in plan.program.block(BODY).ops if isinstance(op, Route)}
    assert (chosen, k) == (("route", 8) if matters else ("every_expert", 1))
    assert verify(plan, float32=False).ok


def test_noise_in_the_file_of_one_layer_is_refused() -> None:
    with pytest.raises(DiagnosticError, match=r"MOE0202.*`noise` in the file of one `layer`"):
        layer_plan(gate=NOISE)


def test_a_gradient_of_the_attention_router_that_is_not_summed_over_tp_is_found() -> None:
    plan = moe_plan(ep=2, tp=2, gate="attention_router(2)")
    assert plan.parameters["layers.1.moe.gate.weight"].shape == (24, 16)
    assert not verify(change_sums(plan, "moe.gate.weight", ("dp",)), float32=False).ok


@pytest.mark.parametrize(("gate", "warned"), [("attention_router(1)", True), ("attention_router(2)", False)])
def test_one_choice_by_attention_is_warned_of(gate: str, warned: bool) -> None:
    found = load_text(moe_text(gate=gate)).diagnostics
    assert ("MOE0321" in {diagnostic.code for diagnostic in found}) == warned

"""The gate `dselect_k`: sparse once codes are binary, with a term of the loss of its own, and faults that are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.plans import BODY, layer_text, moe_plan, moe_spec, moe_text
from support.wrong_plans import change_op, change_sums

import moec
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify


def aux_loss(scale: float, k: int, entropy: float) -> float:
    """The loss of one layer whose codes are those of a new model times `scale`."""
    model = reference(moe_spec(gate=f"dselect_k({k}, entropy = {entropy})", balance="[]", depth=2), seed=1)
    with torch.no_grad():
        model.get_parameter("layers.1.moe.gate.codes.weight").mul_(scale)
    return model(torch.randint(32, (4, 8))).aux_loss.item()


def test_the_entropy_is_that_of_the_codes() -> None:
    """Codes of 0 give every expert 1/8: k · log 8. Binary codes have no entropy."""
    for k in (1, 3):
        assert aux_loss(0.0, k, 0.5) == pytest.approx(0.5 * k * torch.tensor(8.0).log().item(), rel=1e-6)
    assert aux_loss(1e9, 2, 0.5) == 0


def test_tokens_go_to_k_experts_once_codes_are_binary() -> None:
    plan = moe_plan(ranks=1, ep=1, gate="dselect_k(2)", balance="[]", depth=2)
    tokens, labels = torch.randint(32, (2, 8, 8))
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        job.step(model, tokens, labels)
        assert sum(loads.sum() for loads in job.expert_loads(model).values()) == 8 * tokens.numel()
        with torch.no_grad():
            model.get_parameter("layers.1.moe.gate.codes.weight").mul_(1e9)
        job.step(model, tokens, labels)
        assert sum(loads.sum() for loads in job.expert_loads(model).values()) <= 2 * tokens.numel()


def test_a_capacity_drops_by_token_order_alone() -> None:
    """Every choice has a queue of its own, so that no later token takes a place (MOE0322)."""
    for gate, warned in (("dselect_k(2)", []), ("topk(2)", ["MOE0322"])):
        text = moe_text(gate=gate, balance="[]", beside="capacity = factor(0.5)")
        assert [found.code for found in load_text(text).diagnostics] == warned


def unsummed(plan: Plan) -> Plan:
    return change_sums(plan, "moe.gate.codes.weight", ())


def other_steps(plan: Plan) -> Plan:
    return change_op(plan, BODY, "w", gamma=0.9)


def unweighted(plan: Plan) -> Plan:
    return change_op(plan, BODY, "balance", weights=(0.2,))


@pytest.mark.parametrize("fault", [unsummed, other_steps, unweighted])
def test_verify_finds_a_wrong_plan(fault: Callable[[Plan], Plan]) -> None:
    plan = moe_plan(ep=2, tp=2, gate="dselect_k(2, entropy = 0.1)", balance="[]")
    assert not verify(fault(plan), float32=False).ok


def test_a_layer_file_has_the_term_too() -> None:
    layer = moec.layer(layer_text(ranks=1, gate="dselect_k(2, entropy = 0.1)", balance="[]"))
    layer(torch.randn(4, 16))
    assert 0 < layer.aux_loss.item() <= 0.1 * 2 * 3


@pytest.mark.parametrize("experts", [1, 3, 6])
def test_experts_that_no_code_names_are_refused(experts: int) -> None:
    with pytest.raises(DiagnosticError) as error:
        moe_spec(gate="dselect_k(1)", balance="[]", experts=experts, ep=1)
    (found,) = error.value.diagnostics
    assert found.code == "MOE0346"
    assert found.span

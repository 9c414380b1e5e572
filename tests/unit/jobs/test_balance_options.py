"""Balance terms of sequences and of groups of experts: padding, and faults in their plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import BODY, layer_plan, moe_plan, moe_spec, moe_text
from support.wrong_plans import change_op
from torch import Tensor

from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir.ops import SumGroups
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

PADDED = "embedding = tokens(padding = 3)"
V3 = "topk(2, score = sigmoid, normalize = true, groups = 4, keep_groups = 2, bias = online(0.01))"
TERMS = ["sequence_loss(0.5)", "device_loss(0.5, groups = 2)", "switch_loss(0.5, fractions = scores)"]


def values(terms: str, group: str, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The balance terms and their gradients."""
    spec = moe_spec(ranks=1, ep=1, model=PADDED, gate=V3, balance=f"[{terms}]", beside=f"group = {group}")
    model = reference(spec, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    loss = model(tokens).aux_loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("group", ["sequence", "batch"])
def test_padding_changes_no_term_and_no_gradient(group: str, terms: str) -> None:
    tokens = torch.randint(4, 32, (3, 8), generator=torch.Generator().manual_seed(4))
    tokens[:, 5:] = 3
    loss, gradients = values(terms, group, tokens)
    alone, expected = values(terms, group, tokens[:, :5])
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=1e-14)
    assert loss > 0.1
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)


CONSTANT = {
    "dense": {"switch_loss(1.0)", "sequence_loss(1.0)", "device_loss(1.0, groups = 2)"},
    "expert_choice": {"switch_loss(1.0)", "sequence_loss(1.0)", "device_loss(1.0, groups = 2)"},
    "topk(8)": {"switch_loss(1.0)", "sequence_loss(1.0)", "device_loss(1.0, groups = 2)"},
    "dselect_k(2, gamma = 0.05)": {"sequence_loss(1.0)"},
    "topk(7)": set(),
    "gshard": set(),
}


@pytest.mark.parametrize("gate", CONSTANT)
def test_terms_without_a_gradient_are_warned_of_and_no_others(gate: str) -> None:
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    for term in ("switch_loss(1.0)", "sequence_loss(1.0)", "device_loss(1.0, groups = 2)"):
        loaded = load_text(moe_text(gate=gate, balance=f"[{term}]", depth=2))
        constant = [one for one in loaded.diagnostics if one.code == "MOE0345"]
        assert len(constant) == (term in CONSTANT[gate])
        assert all(one.span and one.severity == "warning" for one in constant)
        model = reference(loaded.unwrap(), seed=1, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(20 if ".gate." in name else 1)
        model(tokens).aux_loss.backward()
        gradients = [
            p.grad.abs().max() for name, p in model.named_parameters() if ".gate." in name and p.grad is not None
        ]
        assert (max(gradients) < 1e-12) == (term in CONSTANT[gate]), (term, gradients)


def test_a_sequence_loss_over_other_scores_is_found() -> None:
    plan = moe_plan(ep=2, tp=2, gate=V3, balance="[sequence_loss(0.5)]")
    (largest,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == "largest_scores")
    (counts,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == "count_choices")
    chosen = next(op for op in plan.program.block(BODY).ops if op.mnemonic == "route").results[2].name
    assert counts.operands == (largest.results[0].name,)
    assert not verify(change_op(plan, BODY, counts.results[0].name, operands=(chosen,)), float32=False).ok


# ---- device_loss -------------------------------------------------------------------------------------------

DEVICES = {"balance": "[device_loss(0.5)]"}


def groups_of(**options: Any) -> set[int]:
    program = moe_plan(**options).program
    return {op.groups for block in program.blocks for op in block.ops if isinstance(op, SumGroups)}


def test_groups_are_the_stated_ep_and_no_other_degree() -> None:
    assert groups_of(ep=4, **DEVICES) == {4}
    assert groups_of(ep=2, tp=2, zero=3, **DEVICES) == {2}
    assert groups_of(ep=1, balance="[device_loss(0.5, groups = 8)]") == {8}
    assert groups_of(mixtures=((8, 2), (8, 4), (8, None)), ep=1, **DEVICES) == {1, 2, 4}


def test_the_loss_depends_on_the_groups_and_not_on_the_ranks() -> None:
    tokens = torch.arange(16).view(2, 8)
    found = []
    for options in (
        {"ranks": 4, "ep": 4},
        {"ranks": 8, "ep": 4, "tp": 2},
        {"ranks": 8, "ep": 8},
        {"ranks": 8, "ep": 2},
    ):
        found.append(reference(moe_spec(**options, **DEVICES), seed=1, dtype=torch.float64)(tokens).aux_loss.detach())
    stated = moe_spec(ranks=1, ep=1, balance="[device_loss(0.5, groups = 4)]")
    found.append(reference(stated, seed=1, dtype=torch.float64)(tokens).aux_loss.detach())
    assert found[0] == found[1] == found[4]
    assert len({float(value) for value in found}) == 3


def test_groups_that_nothing_states_or_that_do_not_divide_the_experts_are_refused() -> None:
    found = load_text(moe_text(ep=None, **DEVICES)).diagnostics
    assert [diagnostic.code for diagnostic in found] == ["MOE0340"]
    found = load_text(moe_text(balance="[device_loss(0.5, groups = 3)]")).diagnostics
    assert [diagnostic.code for diagnostic in found] == ["MOE0341"]
    assert "MOE0341" in {diagnostic.code for diagnostic in load_text(moe_text(ep=3, ranks=3, **DEVICES)).diagnostics}
    with pytest.raises(DiagnosticError, match="MOE0340"):
        layer_plan(balance="[device_loss(0.5)]")
    program = layer_plan(balance="[device_loss(0.5)]", ep=2).program
    assert {op.groups for block in program.blocks for op in block.ops if isinstance(op, SumGroups)} == {2}


GROUPED: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "beside": "group = batch"}, {"model": PADDED}]


@pytest.mark.parametrize("place", some(range(4), [2, 3]))
def test_another_number_of_groups_is_found(place: int) -> None:
    plan = moe_plan(ep=4, **GROUPED[place], **DEVICES)
    assert verify(plan, float32=False).ok
    for op in [op for op in plan.program.block(BODY).ops if isinstance(op, SumGroups)]:
        plan = change_op(plan, BODY, op.results[0].name, groups=2)
    assert not verify(plan, float32=False).ok

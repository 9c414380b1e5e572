"""moec verify names the op at fault where the backward pass is wrong, or cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults import op_giving
from models import moe_plan
from torch import fx

from moec.codegen.emit import facts_of
from moec.runtime.verify.lockstep import Lockstep
from moec.runtime.verify.verification import BOUND, verify

WHOLE_TOKENS = {"tp": 2, "ep": 4, "sequence_parallel": False}
STOPS = {
    "all_gather": ({"tp": 2, "ep": 4}, "forward"),
    "all_gather_alike": (WHOLE_TOKENS, "layers.2"),
    "all_reduce": ({"ep": 4}, "aux_loss"),
    "all_to_all": ({"ep": 4}, "layers.2"),
    "all_to_all_padded": ({"ep": 4, "beside": "capacity = factor(1.0)"}, "layers.2"),
    "copy_to": (WHOLE_TOKENS, "forward"),
    "embed": ({"tp": 2}, "forward"),
    "label_logit": ({"tp": 2}, "loss"),
    "reduce_scatter": ({"tp": 2, "ep": 4}, "layers.2"),
    "slice": (WHOLE_TOKENS, "layers.2"),
}
"""A plan that has an op whose ranks depend on each other, and where backward comes to it first."""


@pytest.mark.parametrize("mnemonic", STOPS)
def test_an_op_whose_backward_cannot_run_is_named(mnemonic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, layer = STOPS[mnemonic]
    call, reached = Lockstep._call, []

    def refusing(self: Lockstep, node: fx.Node, values: Any) -> list[Any]:
        class Refusing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, gradient):
                facts = facts_of(node)
                reached.append((facts.value.name, str(facts.op.span)))
                raise RuntimeError("shape '[3]' is invalid")

        results = call(self, node, values)
        if facts_of(node).op.mnemonic != mnemonic or len(self.ranks) == 1:
            return results
        return [Refusing.apply(result) for result in results]

    monkeypatch.setattr(Lockstep, "_call", refusing)
    report = verify(moe_plan(**options), float32=False)
    assert not report.ok
    assert report.max_output_error < BOUND
    assert report.worst == "gradient of the backward pass, which stopped: shape '[3]' is invalid"
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.op, found.layer, (found.value, found.span)) == (mnemonic, layer, reached[0])


class Doubled(torch.autograd.Function):
    """A value whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def doubled(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return tuple(map(doubled, result))
    floating = isinstance(result, torch.Tensor) and result.is_floating_point() and result.requires_grad
    return Doubled.apply(result) if floating else result


BODY = "layers[1..2]"
SHARED = {"beside": "shared = swiglu(8, gated = true)"}
SIBLINGS = [
    ("rows#1", {"ep": 4}),
    ("rows#1", {"ep": 4, "beside": "capacity = factor(1.0)"}),
    ("z_loss#1", {"ep": 4}),
    ("hidden#2", {"tp": 2, "ep": 4, **SHARED}),
    ("shares", {"tp": 2, "ep": 4, **SHARED}),
    ("h.3", {"tp": 2, "ep": 4, **SHARED}),
    ("logits", {**WHOLE_TOKENS, **SHARED}),
    ("h.4", {**WHOLE_TOKENS, **SHARED}),
]
"""Nodes of which others use the same value: permute beside the router, the router beside its z-loss, shared experts."""


@pytest.mark.parametrize(("key", "options"), SIBLINGS, ids=str)
def test_an_op_and_none_beside_it_is_blamed_for_a_wrong_gradient(
    key: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = moe_plan(**options)
    op = op_giving(plan, BODY, key.split("#")[0])
    call = Lockstep._call

    def wrong(self: Lockstep, node: fx.Node, values: Any) -> list[Any]:
        results, facts = call(self, node, values), facts_of(node)
        return list(map(doubled, results)) if facts.key == key and facts.op is op else results

    monkeypatch.setattr(Lockstep, "_call", wrong)
    report = verify(plan, float32=False)
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.layer, found.op, found.span) == ("layers.2", op.mnemonic, str(op.span))

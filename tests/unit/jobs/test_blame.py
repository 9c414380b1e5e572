"""moec verify names the op at fault where the backward pass is wrong, or cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import moe_plan
from torch import fx

from moec.codegen.graph import Node
from moec.runtime import shuffles
from moec.runtime.lockstep import Lockstep
from moec.runtime.verify import BOUND, verify

WHOLE_TOKENS = {"tp": 2, "ep": 4, "sequence_parallel": False}
STOPS = {
    "moec.all_gather.default": ({"tp": 2, "ep": 4}, "forward"),
    "moec.all_gather_alike.default": (WHOLE_TOKENS, "layers.2"),
    "moec.all_reduce.default": ({"ep": 4}, "aux_loss"),
    "moec.all_to_all.default": ({"ep": 4}, "layers.2"),
    "moec.all_to_all_padded.default": ({"ep": 4, "beside": "capacity = factor(1.0)"}, "layers.2"),
    "moec.copy_to.default": (WHOLE_TOKENS, "forward"),
    "moec.embed_part.default": ({"tp": 2}, "forward"),
    "moec.label_logit.default": ({"tp": 2}, "loss"),
    "moec.reduce_scatter.default": ({"tp": 2, "ep": 4}, "layers.2"),
    "moec.slice.default": (WHOLE_TOKENS, "layers.2"),
}
"""A plan that has the operator, and where backward comes to it first."""


@pytest.mark.parametrize("target", STOPS)
def test_an_operator_whose_backward_cannot_run_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, layer = STOPS[target]
    shuffle, reached = shuffles.SHUFFLES[target], []

    def refusing(data: Node, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        class Refusing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, gradient):
                reached.append((data.value or data.name, data.span))
                raise RuntimeError("shape '[3]' is invalid")

        return [Refusing.apply(result) for result in shuffle(data, inputs)]

    monkeypatch.setitem(shuffles.SHUFFLES, target, refusing)
    report = verify(moe_plan(**options), float32=False)
    assert not report.ok
    assert report.max_output_error < BOUND
    assert report.worst == "gradient of the backward pass, which stopped: shape '[3]' is invalid"
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.op, found.layer, (found.value, found.span)) == (target, layer, reached[0])


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
    ("rows_all", {"ep": 4}),
    ("rows_all", {"ep": 4, "beside": "capacity = factor(1.0)"}),
    ("z_loss_lse", {"ep": 4}),
    ("hidden_flat", {"tp": 2, "ep": 4, **SHARED}),
    ("shares", {"tp": 2, "ep": 4, **SHARED}),
    ("h_3", {"tp": 2, "ep": 4, **SHARED}),
    ("logits", {**WHOLE_TOKENS, **SHARED}),
    ("h_4", {**WHOLE_TOKENS, **SHARED}),
]
"""Ops of which others use the same value: permute beside the router, the router beside its z-loss, shared experts."""


@pytest.mark.parametrize(("name", "options"), SIBLINGS, ids=str)
def test_an_op_and_none_beside_it_is_blamed_for_a_wrong_gradient(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = moe_plan(**options)
    node = next(node for node in plan.stages[0].graph(BODY).nodes if node.name == name)
    call = Lockstep._call

    def wrong(self: Lockstep, fx_node: fx.Node, data: Node, values: Any) -> list[Any]:
        results = call(self, fx_node, data, values)
        return list(map(doubled, results)) if data == node and len(self.ranks) > 1 else results

    monkeypatch.setattr(Lockstep, "_call", wrong)
    report = verify(plan, float32=False)
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.layer, found.op, found.span) == ("layers.2", node.target, node.span)

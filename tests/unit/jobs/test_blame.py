"""moec verify names the op at fault where the backward pass is wrong, or cannot run."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from support.combinations import diagonals, some
from support.plans import BODY, moe_plan
from support.wrong_plans import op_giving
from torch import fx

from moec.codegen.emit import info_of, recomputed
from moec.runtime.ops import recomputed_experts
from moec.runtime.verify.cluster import lockstep
from moec.runtime.verify.cluster.lockstep import Lockstep
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import BOUND

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


@pytest.mark.parametrize("mnemonic", some(list(STOPS), ["all_to_all_padded", "embed", "reduce_scatter", "slice"]))
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
                info = info_of(node)
                reached.append((info.value.name, str(info.op.span)))
                raise RuntimeError("shape '[3]' is invalid")

        results = call(self, node, values)
        if info_of(node).op.mnemonic != mnemonic or len(self.ranks) == 1:
            return results
        return [Refusing.apply(result) for result in results]

    monkeypatch.setattr(Lockstep, "_call", refusing)
    report = verify(moe_plan(**options), float32=False)
    assert not report.ok
    assert report.max_output_error < BOUND
    assert report.worst == "the backward pass, which stopped: shape '[3]' is invalid"
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


SHARED = {"beside": "shared = swiglu(8, gated = true)"}
SIBLINGS: list[tuple[str, dict[str, Any]]] = [
    ("rows#1", {"ep": 4}),
    ("rows#1", {"ep": 4, "beside": "capacity = factor(1.0)"}),
    ("z_loss#1", {"ep": 4}),
    ("hidden#2", {"tp": 2, "ep": 4, **SHARED}),
    ("path_logits", {"tp": 2, "ep": 4, **SHARED}),
    ("h.3", {"tp": 2, "ep": 4, **SHARED}),
    ("logits", {**WHOLE_TOKENS, **SHARED}),
    ("h.4", {**WHOLE_TOKENS, **SHARED}),
]
"""Nodes of which others use the same value: permute beside the router, the router beside its z-loss, shared experts."""


@pytest.mark.parametrize("place", some(range(len(SIBLINGS)), [1, 2, 4, 6]))
def test_an_op_and_none_beside_it_is_blamed_for_a_wrong_gradient(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key, options = SIBLINGS[place]
    plan = moe_plan(**options)
    op = op_giving(plan, BODY, key.split("#")[0])
    call = Lockstep._call

    def wrong(self: Lockstep, node: fx.Node, values: Any) -> list[Any]:
        results, info = call(self, node, values), info_of(node)
        return list(map(doubled, results)) if info.key == key and info.op is op else results

    monkeypatch.setattr(Lockstep, "_call", wrong)
    report = verify(plan, float32=False)
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.layer, found.op, found.span) == ("layers.2", op.mnemonic, str(op.span))


IN_PARTS = ["sums#3", "sums", "sums.1", "label_logit", "label_logit.1", "nll#1", "nll#3", "nll", "loss"]
"""Nodes of a loss over a sharded vocabulary: the reference has one `cross_entropy` there."""


@pytest.mark.parametrize("dtype", some(["fp32", "bf16"], ["bf16"]))
@pytest.mark.parametrize("key", some(IN_PARTS, ["sums#3", "label_logit.1", "nll#3", "loss"]))
def test_an_op_of_a_loss_in_parts_is_blamed_for_a_wrong_gradient(
    key: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bf16 logits are widened first."""
    plan = moe_plan(tp=2, ep=4, dtype=dtype)
    op = op_giving(plan, "loss", key.split("#")[0])
    call = Lockstep._call

    def wrong(self: Lockstep, node: fx.Node, values: Any) -> list[Any]:
        results, info = call(self, node, values), info_of(node)
        return list(map(doubled, results)) if info.key == key and info.op is op else results

    monkeypatch.setattr(Lockstep, "_call", wrong)
    report = verify(plan, float32=False)
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.layer, found.op, found.span) == ("loss", op.mnemonic, str(op.span))


@pytest.mark.parametrize("key", ["sums", "label_logit"])
def test_an_op_of_a_loss_in_parts_is_blamed_for_a_wrong_value(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moe_plan(tp=2, ep=4)
    op = op_giving(plan, "loss", key)
    call = Lockstep._call

    def wrong(self: Lockstep, node: fx.Node, values: Any) -> list[Any]:
        results, info = call(self, node, values), info_of(node)
        return [1.5 * result for result in results] if info.key == key and info.op is op else results

    monkeypatch.setattr(Lockstep, "_call", wrong)
    found = verify(plan, float32=False).first_difference
    assert found is not None
    assert not found.gradient
    assert (found.layer, found.op, found.value) == ("loss", op.mnemonic, key)


GATHERED = [
    ("rows.1", "all_to_all"),
    ("rows.2", "all_gather_rows"),
    ("row_weights.2", "all_gather_rows"),
    ("weighted", "expert_mlp"),
    ("weighted.1", "reduce_scatter_rows"),
]
"""Rows of experts over two axes: the value and its op."""


@pytest.mark.parametrize(("place", "forward"), diagonals(range(len(GATHERED)), [True, False]))
def test_an_op_of_rows_over_two_axes_is_blamed(place: int, forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    key, mnemonic = GATHERED[place]
    plan = moe_plan(ranks=4, ep=2, etp=2)
    op, call = op_giving(plan, BODY, key), Lockstep._call

    def wrong(self: Lockstep, node: fx.Node, values: Any) -> list[Any]:
        results, info = call(self, node, values), info_of(node)
        if info.key != key or info.op is not op:
            return results
        return [1.5 * result for result in results] if forward else list(map(doubled, results))

    monkeypatch.setattr(Lockstep, "_call", wrong)
    found = verify(plan, float32=False).first_difference
    assert found is not None
    assert found.gradient == (not forward)
    assert (found.op, found.span) == (mnemonic, str(op.span))


# ---- recomputation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "position", "degrees", "mnemonic"),
    [("expert_mlp", 1, {"ep": 4}, "expert_mlp"), ("mixture_mlp", 2, {"ranks": 1, "ep": 1}, "mixture_mlp")],
)
def test_experts_that_recompute_other_pre_activations_are_blamed(
    operator: str, position: int, degrees: dict[str, int], mnemonic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the pre-activations, which only backward reads."""
    right = getattr(recomputed_experts, operator)

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        return tuple(2 * r if i == position else r for i, r in enumerate(right(*arguments)))

    monkeypatch.setattr(recomputed_experts, operator, wrong)
    report = verify(moe_plan(**degrees, recompute="experts"), float32=False)
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.layer, found.op) == ("layers.2", mnemonic)


def test_a_layer_that_is_recomputed_wrongly_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of layer 1 are doubled only where backward computes it again."""
    plan, calls = moe_plan(ep=4, recompute="layer"), count()

    def wrong(*arguments: Any) -> Any:
        results = recomputed(*arguments)
        return doubled(results) if next(calls) % plan.spec.subject.depth == 1 else results

    monkeypatch.setattr(lockstep, "recomputed", wrong)
    report = verify(plan, float32=False)
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert found.gradient
    assert (found.layer, found.op) == ("layers.1", "recompute")
    assert found.value.startswith("@")


def test_recomputation_is_not_blamed_for_what_is_wrong_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong gradient that shows only while no value is recorded."""
    call = Lockstep._call

    def wrong(self: Lockstep, node: fx.Node, values: Any) -> list[Any]:
        results = call(self, node, values)
        is_wrong = self.nodes is None and len(self.ranks) > 1 and info_of(node).key == "rows#1"
        return list(map(doubled, results)) if is_wrong else results

    monkeypatch.setattr(Lockstep, "_call", wrong)
    report = verify(moe_plan(ep=4, recompute="layer"), float32=False)
    assert report.max_gradient_error > BOUND
    assert report.first_difference is not None
    assert (report.first_difference.op, report.first_difference.gradient) == ("output", True)

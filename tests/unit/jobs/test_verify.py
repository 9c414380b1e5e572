"""moec verify: right plans pass, wrong ones do not, and the op at fault is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.combinations import some
from support.plans import BODY, moe_plan
from support.verified import require_equal
from support.wrong_plans import (
    Planted,
    bypass,
    change_groups,
    change_kind,
    change_op,
    change_ops,
    change_sums,
    swap_groups,
)

from moec.codegen.emit.emitter import Emitter
from moec.codegen.emit.functions import EMISSIONS
from moec.codegen.plan import Plan
from moec.passes.ir import Op
from moec.passes.ir.ops import AllToAll
from moec.runtime.backends.torch import torch_backend
from moec.runtime.verify.cluster import shuffles
from moec.runtime.verify.distances import relative_error
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import BOUND

DEGREES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4), (16, 8)]


@pytest.mark.parametrize("degrees", some(DEGREES, [(1, 1), (4, 1), (16, 8)]))
def test_a_compiled_plan_equals_the_unsharded_model(degrees: tuple[int, int]):
    ranks, ep = degrees
    report = require_equal(moe_plan(ranks=ranks, ep=ep, batch=ranks))
    assert report.world_size == ranks
    assert not report.scaled
    assert max(report.max_output_error, report.max_gradient_error) < BOUND
    assert report.first_difference is None
    assert report.rounding is not None
    assert report.rounding.ok


PYRAMID = ((8, 2), (16, 4), (32, None), (8, 1))
"""Experts and `ep` of each layer after the first."""


@pytest.mark.parametrize("degrees", some([(4, 4), (8, 8), (16, None), (12, 2)], [(4, 4), (12, 2)]))
def test_a_degree_per_layer_equals_the_unsharded_model(degrees: tuple[int, int | None]):
    ranks, ep = degrees
    plan = moe_plan(ranks=ranks, ep=ep, batch=ranks, mixtures=PYRAMID)
    assert len({(mesh.size("ep"), mesh.size("edp")) for mesh in plan.expert_meshes.values()}) >= 3
    require_equal(plan)


def test_bf16_models_are_verified_in_float64_to_the_last_literal():
    require_equal(moe_plan(dtype="bf16"))


# ---- planted faults --------------------------------------------------------------------------------


def shared_layer(plan: Plan) -> Plan:
    """Layer 2 runs with the parameters of layer 1. The plan still has its own."""
    wrong = change_op(plan, "forward", "x.3", layer=1)
    vars(wrong)["parameters"] = plan.parameters  # they follow from the calls, so those of layer 2 would be gone
    return wrong


FAULTS: dict[str, Callable[[Plan], Plan]] = {
    "the loss is not reduced": lambda p: bypass(p, "loss", "loss.1"),
    "labels are counted on one rank only": lambda p: bypass(p, "valid_labels", "count.1"),
    "tokens are counted on one rank only": lambda p: bypass(p, "num_tokens", "count.1"),
    "the balance is not reduced": lambda p: bypass(p, "aux_loss", "aux_loss.1"),
    "expert gradients are not summed": lambda p: change_sums(p, "experts.up.weight", ()),
    "expert gradients are summed over dp": lambda p: change_sums(p, "experts.down.weight", ("dp",)),
    "dense gradients are not summed": lambda p: change_sums(p, "attention.q.weight", ()),
    "dense gradients are summed twice": lambda p: change_sums(p, "attention.q.weight", ("dp", "dp")),
    "each rank of a group is listed twice": lambda p: change_groups(p, "edp[1..2]", ((0, 2, 0, 2), (1, 3, 1, 3))),
    "each list of a group stands twice": lambda p: change_groups(p, "edp[1..2]", ((0, 2), (2, 0), (1, 3), (3, 1))),
    "a rank is in two lists of a group": lambda p: change_groups(p, "edp[1..2]", ((0, 2), (1, 3), (0, 2))),
    "the router's gradient is summed over edp": lambda p: change_sums(p, "gate.weight", ("edp",)),
    "ep and edp are swapped": swap_groups,
    "rows come back the way they went": lambda p: change_op(p, BODY, "weighted.1", reverse=False),
    "rows go over the wrong group": lambda p: change_op(p, BODY, "rows.1", axis="edp"),
    "the residual is dropped": lambda p: bypass(p, BODY, "x.2"),
    "a neighbour's weight": lambda p: change_op(p, BODY, "k", operands=("h", "@attention.v.weight")),
    "another theta": lambda p: change_op(p, BODY, "q.1", theta=20_000.0),
    "positions are forgotten": lambda p: bypass(p, BODY, "k.1"),
    "weights are not normalised": lambda p: change_op(p, BODY, "w", normalize=False),
    "attention sees the future": lambda p: change_kind(p, BODY, "attended", Planted, emitted="attention to all"),
    "another eps": lambda p: change_op(p, "forward", "h", eps=1e-3),
    "ignored labels count": lambda p: change_op(p, "valid_labels", "count", valid_only=False),
    "a balance term of another weight": lambda p: change_op(p, BODY, "balance", weights=(0.01, 2e-3)),
    "two layers share the first one's experts": lambda p: shared_layer(p),
    "two layers have each other's parameters": lambda p: change_op(
        change_op(p, "forward", "x.2", layer=2), "forward", "x.3", layer=1
    ),
}


FOUND = {
    "another theta": ("layers.1", "q.1", 8, False),
    "positions are forgotten": ("layers.1", "attended", 8, False),
    "weights are not normalised": ("layers.1", "w", 11, False),
    "the residual is dropped": ("forward", "x.2", 7, False),
    "dense gradients are not summed": ("layers.0", "@attention.q.weight", 6, True),
    "expert gradients are not summed": ("layers.1", "@moe.experts.up.weight", 10, True),
    "expert gradients are summed over dp": ("layers.1", "@moe.experts.down.weight", 10, True),
    "the router's gradient is summed over edp": ("layers.1", "@moe.gate.weight", 11, True),
    "a balance term of another weight": ("layers.1", "balance", 12, False),
    "rows go over the wrong group": ("layers.1", "rows.1", 10, False),
}
"""The layer and value of the first difference, its line, and whether it is one of gradients."""

OF_ONE_KIND = {
    *("tokens are counted on one rank only", "the balance is not reduced", "dense gradients are summed twice"),
    *("each list of a group stands twice", "ep and edp are swapped", "rows come back the way they went"),
    *("a neighbour's weight", "another eps", "two layers have each other's parameters"),
}
"""Faults that are found as others of their kind are."""


@pytest.mark.parametrize("fault", some(list(FAULTS), [fault for fault in FAULTS if fault not in OF_ONE_KIND]))
def test_a_planted_fault_is_found(fault: str):
    report = verify(FAULTS[fault](moe_plan()))
    assert not report.ok
    assert max(report.max_output_error, report.max_gradient_error) > 1e-6
    found = report.first_difference
    assert found is not None
    if fault in FOUND:
        layer, value, line, gradient = FOUND[fault]
        assert (found.layer, found.value, found.gradient) == (layer, value, gradient)
        assert found.span == f"tiny.moe:{line}"


def pyramid() -> Plan:
    return moe_plan(ranks=8, ep=8, batch=8, mixtures=PYRAMID)


@pytest.mark.parametrize(("layer", "group"), [(1, "ep[2]"), (2, "ep[1]"), (3, "ep[2]")])
def test_rows_over_the_group_of_another_layer_are_found_where_they_leave(
    layer: int, group: str, monkeypatch: pytest.MonkeyPatch
):
    def emitted(e: Emitter, op: Op) -> None:
        if (e.block.name, op.results[0].name) != (f"layers[{layer}]", "rows.1"):
            return exact(e, op)
        rows, splits, _ = e.refs(op)
        return e.result(op, torch.ops.moec.all_to_all.default, rows, splits, group, False, site=e.site(op))

    exact = EMISSIONS[AllToAll]
    monkeypatch.setitem(EMISSIONS, AllToAll, emitted)
    report = verify(pyramid())
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.layer, found.value) == (f"layers.{layer}", "rows.1")


def test_no_layer_of_any_mesh_is_blamed_for_what_the_loss_does():
    found = verify(bypass(pyramid(), "loss", "loss.1")).first_difference
    assert found is not None
    assert found.layer == "loss"


def test_a_gradient_summed_over_another_layers_replicas_is_named():
    plan = pyramid()
    for group in ("edp[2]", "edp[4]"):
        plan = change_groups(plan, group, plan.groups["edp[1]"])  # right for layer 1 alone
    found = verify(plan).first_difference
    assert found is not None
    assert (found.layer, found.value) == ("layers.2", "@moe.experts.up.weight")


def test_a_collective_with_a_wrong_backward_is_named(monkeypatch):
    exact = shuffles.NODES["moec.all_to_all.default"]

    def deaf(args: shuffles.Args, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [rows * 0.5 + rows.detach() * 0.5 for rows in exact(args, inputs)]

    monkeypatch.setitem(shuffles.NODES, "moec.all_to_all.default", deaf)
    report = verify(moe_plan())
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert (found.layer, found.op, found.value, found.gradient) == ("layers.2", "all_to_all", "weighted", True)


@pytest.mark.parametrize("capacity", ["dropless", "factor(1.25)", "dynamic"])
def test_weights_that_stay_where_rows_travel_are_found(capacity: str):
    """With a capacity there are as many as there should be, those of other experts; else experts refuse them."""
    report = verify(bypass(moe_plan(beside=f"capacity = {capacity}"), BODY, "row_weights.1"))
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.layer, found.value, found.gradient) == ("layers.1", "weighted", False)


def test_weights_of_rows_and_weighted_rows_are_known_by_their_ops():
    new = {"row_weights": "first", "row_weights.1": "first.1", "weighted": "second", "weighted.1": "second.1"}

    def rename(op: Op) -> Op:
        results = tuple(replace(v, name=new.get(v.name, v.name)) for v in op.results)
        return replace(op, operands=tuple(new.get(name, name) for name in op.operands), results=results)

    plan = change_ops(moe_plan(), BODY, lambda ops: [rename(op) for op in ops])
    require_equal(plan)
    found = verify(bypass(moe_plan(), BODY, "row_weights.1")).first_difference
    renamed = verify(bypass(plan, BODY, "first.1")).first_difference
    assert found is not None
    assert renamed is not None
    assert (found.value, renamed.value) == ("weighted", "second")
    assert found.error == renamed.error


@pytest.mark.parametrize("capacity", ["dropless", "factor(1.25)"])
def test_a_gradient_of_weights_that_is_wrong_is_found_where_it_is_made(capacity: str, monkeypatch):
    def halved(*arguments: object) -> tuple[torch.Tensor, ...]:
        *gradients, of_weights = exact(*arguments)
        return *gradients, of_weights / 2

    exact = torch_backend.expert_mlp_backward
    monkeypatch.setattr(torch_backend, "expert_mlp_backward", halved)
    found = verify(moe_plan(beside=f"capacity = {capacity}")).first_difference
    assert found is not None
    assert (found.layer, found.value, found.gradient) == ("layers.2", "row_weights.1", True)
    assert found.op == ("expert_mlp" if capacity == "dropless" else "expert_mlp_padded")


@pytest.mark.parametrize(
    ("got", "whole", "kind", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.0, 0.25),
        ([1e-9, 0.0], [0.0, 0.0], 10.0, 1e-7),
        ([1.0, float("nan")], [1.0, 2.0], 0.0, float("inf")),
        ([1.0, 0.0], [0.0, 0.0], 0.0, float("inf")),
        ([1.0], [1.0, 2.0], 0.0, float("inf")),
    ],
)
def test_errors_are_measured_against_the_largest_element(got, whole, kind, error):
    reference = torch.tensor(whole, dtype=torch.float64)
    assert relative_error(torch.tensor(got, dtype=torch.float64), reference, reference, kind) == pytest.approx(error)


# ---- learned positions -----------------------------------------------------------------------------

POSITIONS = "embedding = tokens(positions = learned)"


@pytest.mark.parametrize(
    ("plant", "layer", "value"),
    [
        (lambda p: bypass(p, BODY, "x.2"), "forward", "x.3"),
        (lambda p: bypass(p, BODY, "weighted.1"), "layers.1", "mixed"),
        (lambda p: change_sums(p, "positions.weight", ()), "forward", "@positions.weight"),
        (lambda p: change_sums(p, "experts.up.weight", ()), "layers.1", "@moe.experts.up.weight"),
        (
            lambda p: change_kind(p, "forward", "positions", Planted, emitted="positions from one"),
            "forward",
            "positions",
        ),
    ],
)
def test_wrong_plans_of_models_with_learned_positions_are_refused_and_the_op_named(plant, layer: str, value: str):
    report = verify(plant(moe_plan(model=POSITIONS)), float32=False)
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.layer, found.value) == (layer, value)

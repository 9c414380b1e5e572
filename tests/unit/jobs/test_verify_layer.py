"""moec verify on the plan of a `layer` file: y, aux_loss, counts, and every gradient, that of x among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.combinations import some
from support.plans import layer_plan, moe_plan
from support.verified import require_equal
from support.wrong_plans import (
    Planted,
    bypass,
    change_block,
    change_kind,
    change_op,
    change_sums,
    insert_after,
    rounded_to_bf16,
    swap_groups,
    with_program,
)

from moec.codegen.plan import Plan
from moec.passes.ir.ops import AllReduce, CopyTo
from moec.runtime.verify.blame import first_difference
from moec.runtime.verify.inputs import global_batch
from moec.runtime.verify.unsharded import outcome, unsharded
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import BOUND

BODY = "layers[0]"
KINDS: dict[str, dict[str, object]] = {
    "one rank": {"ranks": 1},
    "dp": {"ep": 1},
    "ep and edp": {"ep": 2},
    "ep": {"ep": 4},
    "more ranks than experts": {"ranks": 16, "experts": 8},
    "without balance": {"balance": "[]"},
    "balance of a sequence, of a rank": {"ep": 2, "beside": "group = rank"},
    "capacity": {"ep": 2, "beside": "capacity = factor(0.75)"},
    "capacity of the rank's tokens": {"ep": 4, "beside": "capacity = factor(1.25); group = rank"},
    "dynamic capacity": {"ep": 2, "beside": "capacity = dynamic()"},
    "shared": {"ep": 2, "beside": "shared = swiglu(8, gated = true)"},
    "residual": {"ep": 4, "beside": "residual = gelu(8)"},
    "biases": {"ep": 2, "expert": "gelu(16, bias = true)", "beside": "shared = relu(8, bias = true)"},
    "biases in places": {"ep": 2, "expert": "geglu(8, bias = true)", "beside": "capacity = factor(1.0)"},
    "switch": {"ep": 2, "gate": "switch"},
    "sigmoid": {"ep": 4, "gate": "topk(3, score = sigmoid)"},
}


DTYPES = ("fp32", "bf16")
PLAIN = ("one rank", "dp", "ep", "capacity", "switch")
"""Kinds that are part of other ones."""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=pytest.mark.slow if kind in PLAIN or dtype != DTYPES[place % 2] else ())
        for place, kind in enumerate(KINDS)
        for dtype in DTYPES
    ],
)
def test_a_compiled_layer_equals_the_unsharded_one(kind: str, dtype: str):
    plan = layer_plan(dtype=dtype, **KINDS[kind])
    report = require_equal(plan)
    assert report.subject == "layer"
    assert max(report.max_output_error, report.max_gradient_error) < BOUND
    assert report.rounding is not None
    assert report.rounding.gradients.keys() == plan.parameters.keys() | {"x"}


SOME = ["ep and edp", "capacity of the rank's tokens", "dynamic capacity", "shared", "biases in places", "sigmoid"]


@pytest.mark.parametrize("kind", some(list(KINDS), SOME))
def test_nothing_is_blamed_in_a_right_plan_of_a_layer(kind: str):
    plan = layer_plan(**KINDS[kind])
    model, inputs = unsharded(plan.spec, dtype=torch.float64), global_batch(plan, seed=0)
    outcome(model, inputs).differentiated.backward()
    assert first_difference(plan, model, inputs) is None


def test_a_layer_is_differentiated_by_a_cotangent_and_its_balance_and_neither_drowns_the_other():
    plan = layer_plan()
    model, inputs = unsharded(plan.spec, dtype=torch.float64), global_batch(plan, seed=0)
    found = outcome(model, inputs)
    aux_loss = found.scalars["aux_loss"]
    torch.testing.assert_close(found.differentiated, (found.result * inputs.targets).sum() + aux_loss)
    gate = model.get_parameter("layers.0.moe.gate.weight")
    of_y, of_balance = (
        torch.autograd.grad(term, gate, retain_graph=True)[0].norm()
        for term in (found.differentiated - aux_loss, aux_loss)
    )
    assert 0.01 < of_y / of_balance < 100


# ---- planted faults --------------------------------------------------------------------------------


FAULTS: dict[str, tuple[Callable[[Plan], Plan], tuple[str, str, int | None, bool]]] = {
    "expert gradients are not summed": (
        lambda p: change_sums(p, "experts.up.weight", ()),
        ("layers.0", "@moe.experts.up.weight", 5, True),
    ),
    "expert gradients are summed over dp": (
        lambda p: change_sums(p, "experts.down.weight", ("dp",)),
        ("layers.0", "@moe.experts.down.weight", 5, True),
    ),
    "the gate's gradient is not summed": (
        lambda p: change_sums(p, "gate.weight", ()),
        ("layers.0", "@moe.gate.weight", 6, True),
    ),
    "the gate's gradient is summed over edp": (
        lambda p: change_sums(p, "gate.weight", ("edp",)),
        ("layers.0", "@moe.gate.weight", 6, True),
    ),
    "the gradient of x is summed over ranks": (
        lambda p: insert_after(p, BODY, "x", CopyTo, axis="dp"),
        ("layers.0", "x", None, True),
    ),
    "y is summed over ranks": (
        lambda p: insert_after(p, "forward", "y", AllReduce, axis="dp"),
        ("forward", "y", 1, False),
    ),
    "the shared path is dropped": (lambda p: bypass(p, BODY, "mixed.1"), ("forward", "y", 1, False)),
    "tokens are counted on one rank only": (
        lambda p: bypass(p, "num_tokens", "count.1"),
        ("aux_loss", "aux_loss", 1, False),
    ),
    "the balance is not reduced": (lambda p: bypass(p, "aux_loss", "aux_loss.1"), ("aux_loss", "aux_loss", 1, False)),
    "the balance is reduced over ep": (
        lambda p: change_op(change_block(p, "aux_loss", experts="experts[0]"), "aux_loss", "aux_loss.1", axis="ep"),
        ("aux_loss", "aux_loss.1", 1, False),
    ),
    "a balance term of another weight": (
        lambda p: change_op(p, BODY, "balance", weights=(0.01, 2e-3)),
        ("layers.0", "balance", 7, False),
    ),
    "weights are not normalised": (
        lambda p: change_op(p, BODY, "w", normalize=False),
        ("layers.0", "w", 6, False),
    ),
    "ep and edp are swapped": (lambda p: swap_groups(p, "[0]"), ("layers.0", "rows.1", 5, False)),
    "rows go over the wrong group": (
        lambda p: change_op(p, BODY, "rows.1", axis="edp"),
        ("layers.0", "rows.1", 5, False),
    ),
    "rows come back the way they went": (
        lambda p: change_op(p, BODY, "weighted.1", reverse=False),
        ("layers.0", "weighted.1", 4, False),
    ),
    "another activation": (
        lambda p: change_op(p, BODY, "active", kind="geglu"),
        ("layers.0", "active", 7, False),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_a_layer_is_refused_and_named(fault: str):
    plant, expected = FAULTS[fault]
    report = verify(plant(layer_plan(ep=2, beside="shared = swiglu(8)")))
    assert not report.ok
    assert max(report.max_output_error, report.max_gradient_error) > 1e-6
    first = report.first_difference
    assert first is not None
    layer, value, line, gradient = expected
    span = None if line is None else f"ffn.moe:{line}"
    assert (first.layer, first.value, first.span, first.gradient) == (layer, value, span, gradient)


@pytest.mark.parametrize("role", ["residual", "balance", "counts"])
def test_a_layer_that_lacks_a_result_is_refused(role: str):
    plan = layer_plan()
    kept = tuple(output for output in plan.program.block("forward").outputs if output.role != role)
    report = verify(change_block(plan, "forward", outputs=kept))
    assert not report.ok
    assert report.first_difference is not None


def test_a_layer_without_the_block_of_its_balance_is_refused():
    plan = layer_plan()
    blocks = tuple(block for block in plan.program.blocks if block.name != "aux_loss")
    first = verify(with_program(plan, replace(plan.program, blocks=blocks))).first_difference
    assert first is not None
    assert (first.layer, first.op) == ("aux_loss", "graph")


def test_y_of_another_shape_is_refused_where_it_leaves_the_layer():
    report = verify(insert_after(layer_plan(), "forward", "y", Planted, emitted="flattened"))
    assert not report.ok
    assert "another shape than x" in report.worst
    assert report.first_difference is not None
    assert report.first_difference.layer == "forward"


def test_a_capacity_without_its_exchange_is_refused():
    report = verify(bypass(layer_plan(ep=4, beside="capacity = factor(1.0)"), BODY, "rows.1"))
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.layer.startswith("layers.0")


# ---- in the layer's own dtype ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "block", "name", "worst"),
    [
        ("bf16", BODY, "logits", "the router logits of layers.0, rounded to bf16"),
        ("bf16", "aux_loss", "aux_loss", "the aux_loss"),
        ("bf16", BODY, "balance", "the aux_loss"),
        ("fp32", BODY, "mixed", ""),
        ("fp32", BODY, "hidden", ""),
    ],
)
def test_what_rounds_where_the_layer_does_not_is_refused(dtype: str, block: str, name: str, worst: str):
    plan = layer_plan(dtype=dtype, ep=2, beside="shared = swiglu(8)")
    report = verify(rounded_to_bf16(plan, block, name), float32=False)
    assert report.max_gradient_error < 1e-12
    assert not report.ok
    assert worst in report.worst


def test_rounding_what_has_that_dtype_already_is_no_fault():
    plan = change_kind(layer_plan(dtype="bf16"), BODY, "logits", Planted, emitted="router of bf16")
    require_equal(plan, float32=False)


# ---- at toy widths ---------------------------------------------------------------------------------

LARGE: dict[str, object] = {"dim": 4096, "expert": "swiglu(14336)", "experts": 16}


@pytest.mark.parametrize("beside", ["", "shared = swiglu(4096); capacity = factor(1.0)", "residual = gelu(4096)"])
def test_a_layer_too_large_is_verified_at_toy_widths(beside: str):
    report = require_equal(layer_plan(ranks=8, ep=4, beside=beside, **LARGE))
    assert report.scaled
    assert str(report.widths[0]) == "dim 4096 → 16"
    assert {width.name for width in report.widths} == {"dim", "hidden"}


def test_a_large_layer_that_moec_would_not_compile_so_is_refused():
    report = verify(change_op(layer_plan(**LARGE), BODY, "balance", weights=(0.01, 2e-3)))
    assert not report.ok
    assert report.scaled
    assert report.first_difference is not None
    assert (report.first_difference.value, report.first_difference.unlike) == ("balance", True)


def test_scaling_a_small_layer_can_be_asked_for():
    assert verify(layer_plan(dim=64), scale=True).scaled


def test_what_is_verified_says_whether_it_is_a_model_or_a_layer():
    assert verify(moe_plan(ranks=1, ep=1)).subject == "model"

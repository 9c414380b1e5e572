"""Biases of routed experts: plans equal the unsharded model, and a missing one is found."""

from __future__ import annotations

import pytest
from support.combinations import diagonals
from support.plans import BODY, moe_plan, moe_spec
from support.verified import require_equal
from support.wrong_plans import bypass, change_op, change_sums, op_giving

from moec.codegen.plan import Plan
from moec.passes.ir import Init
from moec.passes.pipeline import compile_program
from moec.runtime.verify.verification import verify

EXPERT = "swiglu(16, bias = true)"
CAPACITIES = ["dropless", "factor(1.25)", "dynamic", "dynamic(max = 0.75)"]
DEGREES = [{"ep": 1}, {"ep": 2}, {"ep": 1, "tp": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "etp": 2}]


def biased(capacity: str = "dropless", expert: str = EXPERT, **options: object) -> Plan:
    return moe_plan(expert=expert, beside=f"capacity = {capacity}", **options)


@pytest.mark.parametrize(("capacity", "degrees"), diagonals(CAPACITIES, DEGREES))
def test_plans_equal_the_unsharded_model(capacity: str, degrees: dict[str, int]) -> None:
    require_equal(biased(capacity, **degrees))


def test_with_other_activations_in_float32_too() -> None:
    """A layer for each, on one rank of ep and on two."""
    layers = [f"moe {{ experts = 8 * {kind}(16, bias = true) }}" for kind in ("geglu", "gelu", "relu2", "silu")]
    report = require_equal(moe_plan(layers=layers, mixtures=((8, 1), (8, 2), (8, 1), (8, 2))))
    assert report.rounding is not None
    assert report.rounding.ok


@pytest.mark.parametrize("ep", [1, 2])
def test_at_toy_widths(ep: int) -> None:
    plan = biased(expert="swiglu(4096, bias = true)", dim=1024, dtype="bf16", ep=ep)
    report = require_equal(plan, scale=True)
    assert report.scaled


@pytest.mark.parametrize("part", ["up", "down"])
@pytest.mark.parametrize("ep", [1, 2])
def test_they_start_at_zero_do_not_decay_and_lie_with_their_experts(part: str, ep: int) -> None:
    program = compile_program(moe_spec(expert=EXPERT, ep=ep)).program
    parameters = {p.name: p for p in program.block(BODY).parameters}
    weight, bias = (parameters[f"moe.experts.{part}.{kind}"] for kind in ("weight", "bias"))
    assert bias.shape == weight.shape[:-1]
    assert bias.init == Init(kind="zeros")
    assert weight.decays
    assert not bias.decays
    assert (bias.layout, bias.sum_over, bias.dtype) == (weight.layout, weight.sum_over, weight.dtype)
    assert bias.span is not None


@pytest.mark.parametrize(("capacity", "ep"), diagonals(["dropless", "factor(1.25)"], [1, 2]))
def test_biases_that_are_forgotten_are_found(capacity: str, ep: int) -> None:
    plan, value = biased(capacity, ep=ep), "mixed" if ep == 1 else "weighted"
    op = op_giving(plan, BODY, value)
    without = {name: operand for name, operand in op.named(op.operands).items() if not name.endswith("_bias")}
    report = verify(change_op(plan, BODY, value, **op.taking(without)))
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.layer, found.value) == ("layers.1", value)
    assert found.span == "tiny.moe:10"


@pytest.mark.parametrize(("part", "capacity"), diagonals(["up", "down"], ["dropless", "factor(1.25)"]))
def test_a_gradient_that_is_not_summed_is_found(part: str, capacity: str) -> None:
    found = verify(change_sums(biased(capacity), f"experts.{part}.bias", ())).first_difference
    assert found is not None
    assert (found.layer, found.value) == ("layers.1", f"@moe.experts.{part}.bias")


@pytest.mark.parametrize("capacity", ["factor(1.25)", "dynamic"])
def test_what_biases_make_of_empty_places_is_not_blamed(capacity: str) -> None:
    found = verify(bypass(biased(capacity), BODY, "x.2")).first_difference
    assert found is not None
    assert (found.layer, found.value) == ("forward", "x.2")

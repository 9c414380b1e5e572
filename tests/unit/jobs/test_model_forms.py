"""Words of `model` that change what a layer adds: `moec verify` finds a plan that computes another form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans import BODY, moe_plan
from support.wrong_plans import bypass, change_op, change_ops

from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.runtime.verify.verification import verify

TP = {"ranks": 8, "tp": 2, "ep": 4}
MULTIPLIED = "residual_multiplier = 0.22; embedding = tokens(multiplier = 12.0, logits_multiplier = 0.1)"


@pytest.mark.parametrize("block", ["forward", BODY])
@pytest.mark.parametrize("index", [0, 1])
def test_a_factor_that_is_left_out_or_wrong_is_found(block: str, index: int) -> None:
    plan = moe_plan(model=MULTIPLIED, **TP)
    scales = [op for op in plan.program.block(block).ops if isinstance(op, o.Scale)]
    name = scales[index].results[0].name
    assert len(scales) == 2
    for wrong in (bypass(plan, block, name), change_op(plan, block, name, factor=0.5)):
        report = verify(wrong, float32=False)
        assert not report.ok


def test_factors_of_one_add_no_op() -> None:
    ones = "residual_multiplier = 1.0; embedding = tokens(multiplier = 1.0, logits_multiplier = 1.0)"
    plan = moe_plan(model=ones, **TP)
    assert not any(isinstance(op, o.Scale) for block in plan.program.blocks for op in block.ops)


@pytest.mark.parametrize("place", ["post", "res_post", "sandwich"])
def test_a_norm_that_is_left_out_is_found(place: str) -> None:
    plan = moe_plan(model=f"norm_place = {place}", **TP)
    norms = [op for op in plan.program.block(BODY).ops if isinstance(op, o.RmsNorm)]
    assert len(norms) == (4 if place == "sandwich" else 2)
    for op in (norms[0], norms[-1]):
        report = verify(bypass(plan, BODY, op.results[0].name), float32=False)
        assert not report.ok


def test_only_post_norms_have_none_at_the_end() -> None:
    for place in ("pre", "post", "res_post", "sandwich"):
        names = {p.name for p in moe_plan(model=f"norm_place = {place}").program.block("forward").parameters}
        assert ("norm.weight" in names) == (place != "post")


def test_a_feed_forward_that_reads_the_other_norm_is_found() -> None:
    plan = moe_plan(model="parallel_residual = two_norms", **TP)
    first, second = (op.results[0].name for op in plan.program.block(BODY).ops if isinstance(op, o.RmsNorm))
    swapped = {first: second, second: first}

    def exchanged(ops: list[Op]) -> list[Op]:
        return [replace(op, operands=tuple(swapped.get(name, name) for name in op.operands)) for op in ops]

    assert verify(plan, float32=False).ok
    wrong = change_ops(plan, BODY, lambda ops: sorted(exchanged(ops), key=lambda op: not isinstance(op, o.RmsNorm)))
    assert not verify(wrong, float32=False).ok


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_two_partial_sums_side_by_side_are_reduced_once(sequence_parallel: bool) -> None:
    """A dense layer: one reduction in place of two."""

    def reductions(model: str) -> int:
        plan = moe_plan(model=model, **TP, sequence_parallel=sequence_parallel)
        kind = o.ReduceScatter if sequence_parallel else o.AllReduce
        return sum(isinstance(op, kind) for op in plan.program.block("layers[0]").ops)

    assert (reductions(""), reductions("parallel_residual = one_norm")) == (2, 1)

"""`etp` cuts experts by their hidden width, `cp` sequences and, around attention, heads: layouts, sums and faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans import BODY, moe_plan
from support.verified import require_equal
from support.wrong_plans import change_op, change_sums

from moec.codegen.plan import Plan
from moec.grammar.diagnostics import InternalError
from moec.passes.ir.ops import AllToAllPadded, Attention, KeepOnFirst
from moec.passes.ir.verifier import check_program
from moec.runtime.verify.verification import verify

BIASED = "swiglu(16, bias = true)"


def parameter(plan: Plan, name: str) -> str:
    """Where the optimizer state of a parameter of layer 1 lies."""
    return str(plan.parameters[f"layers.1.{name}"].optimizer_state)


@pytest.mark.parametrize("capacity", ["dropless", "factor(1.25)"])
def test_an_output_bias_counts_once_over_etp(capacity: str) -> None:
    plan = moe_plan(expert=BIASED, ep=2, etp=2, beside=f"capacity = {capacity}")
    require_equal(plan)
    (kept,) = (op for op in plan.program.block(BODY).ops if isinstance(op, KeepOnFirst))
    (user,) = (op for op in plan.program.block(BODY).ops if kept.results[0].name in op.operands)
    names = (kept.operands[0] if name == kept.results[0].name else name for name in user.operands)
    wrong = change_op(plan, BODY, user.results[0].name, operands=tuple(names))
    assert not verify(wrong).ok


def test_gradients_of_experts_are_summed_over_edp_where_etp_is_not_tp() -> None:
    plan = moe_plan(ranks=8, ep=2, etp=2, tp=4)
    require_equal(plan)
    name = "moe.experts.up.weight"
    assert plan.parameters[f"layers.1.{name}"].sum_over == ("edp[1..2]",)
    assert not verify(change_sums(plan, "experts.up.weight", ("tp",))).ok


@pytest.mark.parametrize(
    ("expert", "sums"), [("lora(4)", ("etp[1..2]",)), ("linear()", ("etp[1..2]",)), ("swiglu(16)", ())]
)
def test_gradients_of_experts_are_summed_over_etp_where_it_does_not_cut_them(
    expert: str, sums: tuple[str, ...]
) -> None:
    plan = moe_plan(expert=expert, ep=2, etp=2)
    assert {p.sum_over for name, p in plan.parameters.items() if ".experts." in name} == {sums}
    require_equal(plan, float32=False)


def test_zero_cuts_experts_by_their_width_after_etp_and_dense_parts_over_dp_and_cp() -> None:
    plan = moe_plan(ranks=16, ep=2, etp=2, cp=2, tp=2, zero=1, batch=16)
    assert parameter(plan, "moe.experts.up.weight") == "ep:shard(0) etp:shard(2) edp:shard(2)"
    assert parameter(plan, "moe.experts.down.weight") == "ep:shard(0) etp:shard(2) edp:shard(2)"
    assert parameter(plan, "attention_norm.weight") == "dp_cp:shard(0)"
    assert plan.groups["dp_cp"] == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))


def test_cp_cuts_the_sequence_and_around_attention_the_heads() -> None:
    plan = moe_plan(cp=2, ep=2)
    ops = plan.program.block(BODY).ops
    exchanges = [(op.given, op.wanted) for op in ops if isinstance(op, AllToAllPadded) and op.axis == "cp"]
    assert exchanges == [(1, 2)] * 3 + [(2, 1)]
    (attention,) = (op for op in ops if isinstance(op, Attention))
    assert str(attention.results[0].layout) == "cp:shard(2) dp:shard(0)"
    assert str(plan.program.block(BODY).inputs[0].layout) == "cp:shard(1) dp:shard(0)"
    require_equal(plan)


def test_sinks_are_those_of_a_ranks_heads() -> None:
    attention = "gqa(heads = 4, kv_heads = 1, sinks = true, window = 3, rope = rope())"
    plan = moe_plan(attention=attention, cp=2, tp=2, zero=3)
    require_equal(plan)
    sinks = plan.parameters["layers.1.attention.sinks"]
    assert (str(sinks.layout), sinks.sum_over) == ("tp:shard(0)", ())


def test_a_mesh_whose_axes_are_in_another_order_is_refused() -> None:
    program = moe_plan(cp=2, ep=2).program
    swapped = tuple(replace(mesh, axes=mesh.axes[::-1]) if mesh.name == "dense" else mesh for mesh in program.meshes)
    with pytest.raises(InternalError, match="the mesh dense has the axes tp, cp, dp"):
        check_program(replace(program, meshes=swapped))

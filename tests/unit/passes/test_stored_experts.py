"""Experts that their replicas store in parts: gathered before each use, their gradients scattered after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults import change_kind, change_sums
from models import moe_plan

import moec
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import InternalError
from moec.passes.ir import Shard, local_shape
from moec.passes.ir.ops import AllGather, AllGatherAlike
from moec.passes.ir.verifier import check_program
from moec.runtime.verify.verification import verify

BODY = "layers[1..2]"
DEGREES: list[dict[str, Any]] = [
    {"ranks": 4, "ep": 2},
    {"ranks": 4, "ep": 1},
    {"ranks": 8, "ep": 2, "tp": 2},
    {"ranks": 4, "ep": 2, "dtype": "bf16"},
    {"ranks": 4, "ep": 2, "beside": "capacity = factor(1.25)"},
    {"ranks": 4, "ep": 2, "expert": "gelu(16, bias = true)"},
]


def stored(**options: Any) -> Plan:
    return moe_plan(store_experts_over_edp=True, **options)


def experts(plan: Plan) -> list[str]:
    return [name for name in plan.parameters if ".experts." in name]


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_a_rank_stores_its_part_alone_and_the_plan_is_right(degrees: dict[str, Any], tmp_path: Path):
    plan, whole = stored(**degrees), moe_plan(**degrees)
    for name in experts(plan):
        p, other = plan.parameters[name], whole.parameters[name]
        mesh = plan.meshes[p.mesh]
        assert isinstance(p.layout.get("edp"), Shard)
        assert p.sum_over == ()
        assert other.sum_over
        sizes = [int(n) for n in local_shape(p.shape, p.layout, mesh)]
        sizes_whole = [int(n) for n in local_shape(other.shape, other.layout, mesh)]
        assert sum(a != b for a, b in zip(sizes, sizes_whole, strict=True)) == 1
        assert max(b // a for a, b in zip(sizes, sizes_whole, strict=True)) == mesh.size("edp")
    report = verify(plan)
    assert report.ok, report
    assert moec.load(plan.save(tmp_path / "p.plan")) == plan


def test_one_gather_serves_each_parameter_and_its_backward_sums():
    ops = stored(ranks=4, ep=2).program.block(BODY).ops
    gathers = [op for op in ops if isinstance(op, AllGather)]
    assert [op.operands for op in gathers] == [("@moe.experts.up.weight",), ("@moe.experts.down.weight",)]
    assert {op.axis for op in gathers} == {"edp"}


def test_a_dim_that_does_not_divide_is_passed_over_and_what_has_none_stays_whole():
    plan = stored(ranks=12, ep=2, dp=12, batch=24, dim=24, expert="swiglu(12)")
    layouts = {name: str(plan.parameters[f"layers.1.moe.experts.{name}.weight"].layout) for name in ("up", "down")}
    assert layouts == {"up": "edp:shard(2) ep:shard(0)", "down": "edp:shard(1) ep:shard(0)"}
    odd = stored(ranks=10, ep=2, dp=10, batch=10, dim=16, expert="gelu(8)").parameters["layers.1.moe.experts.up.weight"]
    assert (str(odd.layout), odd.sum_over) == ("ep:shard(0)", ("edp[1..2]",))


FAULTS = {
    "a gather whose backward slices": lambda p: change_kind(p, BODY, "up_weight", AllGatherAlike, axis="edp", dim=1),
    "a sum beside the scatter": lambda p: change_sums(p, "experts.up.weight", ("edp",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_gradients_are_refused_by_rule_and_found_by_verify(fault: str):
    wrong = FAULTS[fault](stored(ranks=4, ep=2))
    with pytest.raises(InternalError):
        check_program(wrong.program)
    report = verify(wrong, float32=False)
    assert not report.ok
    assert report.max_gradient_error > 1e-3


def test_nothing_changes_where_experts_have_no_replicas():
    assert replace(stored(ranks=4, ep=4), moec="") == replace(moe_plan(ranks=4, ep=4), moec="")

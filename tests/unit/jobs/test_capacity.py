"""Capacities: plans with one equal the unsharded model, and evaluation can have another.

What a routing group promises of them is in test_routing_groups.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.combinations import diagonals
from support.plans import BODY, moe_plan
from support.verified import require_equal
from support.wrong_plans import change_op, op_giving, with_program

from moec.passes.ir.ops import Capacity, PermutePadded
from moec.runtime.verify.verification import verify

EVALUATED = "capacity = factor(0.5, eval = 1.5); group = {}"
CAPACITIES = ["factor(0.5, eval = 1.5)", "factor(1.5, eval = 0.5)", "dynamic(max = 0.7)"]
DEGREES = [{"ep": 4}, {"ep": 2, "tp": 2}]
GROUPS = ["sequence", "batch", "rank"]


@pytest.mark.parametrize(("capacity", "group", "degrees"), diagonals(CAPACITIES, GROUPS, DEGREES))
def test_plans_equal_the_unsharded_model(capacity: str, group: str, degrees: dict[str, int]):
    require_equal(moe_plan(beside=f"capacity = {capacity}; group = {group}", **degrees))


@pytest.mark.parametrize("wrong", [{"eval_whole": 4}, {"eval_parts": 1, "eval_whole": 1}, {"eval_parts": 1}], ids=str)
def test_a_plan_that_is_wrong_in_evaluation_alone_is_refused(wrong: dict[str, int]):
    plan = moe_plan(beside=EVALUATED.format("batch"))
    report = verify(change_op(plan, BODY, "rows", **wrong), float32=False)
    assert not report.ok
    assert report.worst.endswith("in evaluation")
    assert report.first_difference is not None
    assert report.first_difference.op == "permute_padded"


def test_a_plan_that_is_wrong_in_training_alone_is_refused():
    plan = moe_plan(beside=EVALUATED.format("batch"))
    permuted = op_giving(plan, BODY, "rows")
    assert isinstance(permuted, PermutePadded)
    report = verify(change_op(plan, BODY, "rows", parts=permuted.eval_parts, whole=permuted.eval_whole), float32=False)
    assert not report.ok
    assert not report.worst.endswith("in evaluation")


@pytest.mark.parametrize("setting", [True, False])
def test_a_plan_that_has_lost_its_setting_is_refused(setting: bool):
    """The file decides whether evaluation is compared, not the plan."""
    plan = moe_plan(beside=EVALUATED.format("batch"))
    permuted = op_giving(plan, BODY, "rows")
    assert permuted.operands[-1] == "$training"
    wrong = change_op(plan, BODY, "rows", operands=permuted.operands[:-1], optional=())
    if not setting:
        blocks = tuple(replace(block, settings=()) for block in wrong.program.blocks)
        wrong = with_program(wrong, replace(wrong.program, blocks=blocks))
    report = verify(wrong, float32=False)
    assert not report.ok
    assert report.worst.endswith("in evaluation")


@pytest.mark.parametrize("group", ["sequence", "batch", "rank"])
@pytest.mark.parametrize(("capacity", "settings"), [("factor(0.5, eval = 1.5)", 1), ("dynamic(max = 0.7)", 0)])
def test_one_setting_says_which_capacity_is_in_force(capacity: str, settings: int, group: str):
    plan = moe_plan(beside=f"capacity = {capacity}; group = {group}")
    assert list(plan.program.settings) == ["training"] * settings
    assert [str(s.layout) for s in plan.program.settings.values()] == ["replicate"] * settings
    ops = [op for block in plan.program.blocks for op in block.ops if isinstance(op, Capacity)]
    assert len(ops) == 1
    assert ops[0].varies == bool(settings)

"""Capacities: plans with one equal the unsharded model, and evaluation has one of its own.

What a routing group promises of them is in test_routing_groups.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from faults import change_node
from models import moe_plan

from moec.codegen.checks import require_consistent
from moec.codegen.folder import PlanError
from moec.codegen.graph import Ref
from moec.codegen.plan import Plan
from moec.runtime.verify import verify

EVALUATED = "capacity = factor(0.5, eval = 1.5); group = {}"
PERMUTE = ("layers[1..2]", "rows_all")


@pytest.mark.parametrize("group", ["sequence", "batch", "rank"])
@pytest.mark.parametrize("degrees", [{"ep": 4}, {"ep": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("capacity", ["factor(0.5, eval = 1.5)", "factor(1.5, eval = 0.5)", "dynamic(max = 0.7)"])
def test_plans_equal_the_unsharded_model(capacity: str, group: str, degrees: dict[str, int]):
    report = verify(moe_plan(beside=f"capacity = {capacity}; group = {group}", **degrees), float32=False)
    assert report.ok, report


def change_evaluation(plan: Plan, **changed: Any) -> Plan:
    """Other arguments of permute_padded in evaluation, by name."""
    names = ["x", "experts", "starts", "groups", "spread", "parts", "whole", "least"]
    node = next(n for n in plan.stages[0].graph(PERMUTE[0]).nodes if n.name == PERMUTE[1])
    assert node.evaluation is not None
    given = dict(zip(names, node.evaluation, strict=True)) | changed
    return change_node(plan, *PERMUTE, evaluation=tuple(given.values()))


def test_a_plan_that_is_wrong_in_evaluation_alone_is_refused():
    plan = moe_plan(beside=EVALUATED.format("batch"))
    report = verify(change_evaluation(plan, spread=1), float32=False)
    assert not report.ok
    assert report.worst.endswith("in evaluation")
    assert report.first_difference is not None
    assert "permute_padded" in report.first_difference.op


@pytest.mark.parametrize("changed", [{"experts": Ref(node="h")}, {"least": "__import__('os')"}, {"least": None}])
def test_evaluation_may_differ_in_numbers_only(changed: dict[str, Any], tmp_path):
    plan = change_evaluation(moe_plan(beside=EVALUATED.format("sequence")), **changed)
    with pytest.raises(PlanError):
        require_consistent(tmp_path, plan)

"""Capacities: what promises to be independent of the sharding is, and evaluation has one of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults import change_node
from models import moe_plan, moe_spec
from torch import Tensor

from moec.codegen.checks import require_consistent
from moec.codegen.folder import PlanError
from moec.codegen.graph import Ref
from moec.codegen.plan import Plan
from moec.runtime.reference import reference
from moec.runtime.verify import verify

EVALUATED = "capacity = factor(0.5, eval = 1.5); group = {}"
PERMUTE = ("layers[1..2]", "rows_all")


def logits(capacity: str, group: str, *parts: Tensor, dp: int = 1) -> Tensor:
    """Of an unsharded model's micro-batches, side by side."""
    spec = moe_spec(ranks=dp, dp=dp, ep=1, beside=f"capacity = {capacity}; group = {group}", dtype="fp32")
    model = reference(spec, seed=3, dtype=torch.float64)
    with torch.no_grad():
        return torch.cat([model(part).logits for part in parts])


TOKENS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("capacity", ["factor(0.75)", "dynamic(max = 0.75)"])
def test_sequences_keep_their_choices_in_any_micro_batch(capacity: str):
    whole = logits(capacity, "sequence", TOKENS)
    torch.testing.assert_close(logits(capacity, "sequence", *TOKENS.chunk(4)), whole)
    torch.testing.assert_close(logits(capacity, "sequence", TOKENS, dp=4), whole)


@pytest.mark.parametrize("capacity", ["factor(0.75)", "dynamic(max = 0.75)"])
def test_a_batch_is_one_micro_batch_of_all_ranks(capacity: str):
    whole = logits(capacity, "batch", TOKENS)
    assert (logits(capacity, "batch", *TOKENS.chunk(4)) - whole).abs().max() > 1e-3
    torch.testing.assert_close(logits(capacity, "batch", TOKENS, dp=4), whole)


@pytest.mark.parametrize("capacity", ["factor(0.75)", "dynamic(max = 0.75)"])
def test_a_ranks_part_depends_on_dp(capacity: str):
    whole = logits(capacity, "rank", TOKENS)
    assert (logits(capacity, "rank", TOKENS, dp=4) - whole).abs().max() > 1e-3


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

"""Wrong plans: one random change to a right one; the rules refuse it, or `moec verify` finds it and names an op."""

import random
from functools import cache

import pytest
from mutations import RUN, Change, broken_rule, mutate
from support.combinations import some
from support.plans import moe_plan

from moec.codegen.emit import emit_graph
from moec.codegen.plan import Plan
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.verify.verification import verify

PLANS = (
    {"gate": "topk(2)"},
    {"gate": "topk(2)", "ranks": 8, "tp": 2, "ep": 4},
    {"gate": "topk(2)", "zero": 3},
    {"gate": "topk(2)", "ranks": 8, "tp": 2, "ep": 4, "zero": 1},
)
"""Where weights are normalized, it is the same whether they are scored before the choice or after it."""


def require_found(change: Change) -> None:
    report = verify(change.plan, float32=False)
    assert not report.ok, change.words
    assert report.first_difference is not None, change.words


NUMBERS = some(range(60), range(12))


@cache
def plan_of(which: int) -> Plan:
    return moe_plan(**PLANS[which])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_change_is_refused_or_found_and_an_op_named(number: int):
    change = mutate(plan_of(number % 4), random.Random(f"test/{number}"))
    if broken_rule(change.plan) is None:
        require_found(change)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_breaks_no_rule_is_found_and_an_op_named(number: int):
    draw = random.Random(f"within the rules/{number}")
    change = mutate(plan_of(number % 4), draw)
    while broken_rule(change.plan) is not None:
        change = mutate(plan_of(number % 4), draw)
    require_found(change)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_changes_a_graph_is_found_without_the_rules(number: int):
    draw = random.Random(f"without the rules/{number}")
    change = mutate(plan_of(number % 4), draw, RUN)
    while not has_graphs(change.plan):
        change = mutate(plan_of(number % 4), draw, RUN)
    require_found(change)


def has_graphs(plan: Plan) -> bool:
    """Whether every op can be emitted: some ops that break their rules cannot."""
    try:
        return all(emit_graph(plan.program, block).nodes for block in plan.program.blocks)
    except (ValueError, KeyError):
        return False

"""Random models with the gates and capacities that look at whole routing groups: plans equal the unsharded model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_specs import specs
from support.combinations import covering, diagonals
from support.examples import examples
from support.plans import moe_plan
from support.session import extent
from support.verified import require_equal

from moec.grammar.spec import Spec

GROUPS = ("sequence", "batch", "rank")
FACTORS = (
    "factor(0.6{})",
    "factor(0.5, eval = 0.9{})",
    "dynamic(max = 0.8{})",
    "factor(1.0, min = 2{})",
    "factor(0.7, renormalize = true{})",
)
ORDERED = {
    order: [f"capacity = {factor.format(f', order = {order}')}; group = {g}" for factor in FACTORS for g in GROUPS]
    for order in ("random", "priority", "weight", "token")
}
UNORDERED = [f"capacity = {factor.format('')}; group = {group}" for factor in FACTORS for group in GROUPS]
WORDS: dict[str, st.SearchStrategy[Spec]] = {
    f"order = {order}": specs(max_ranks=8, max_layers=3, capacities=capacities) for order, capacities in ORDERED.items()
}
WORDS["reroute"] = specs(
    max_ranks=8,
    max_layers=3,
    gates=["topk({k})", "topk({k}, score = sigmoid, normalize = true)", "switch", "batch_priority({k})"],
    capacities=[f"{c}; overflow = reroute" for c in (*ORDERED["priority"], *UNORDERED)],
)
WORDS["pad"] = specs(max_ranks=8, max_layers=3, capacities=[f"{c}; overflow = pad" for c in UNORDERED if "fac" in c])
WORDS["batch_priority"] = specs(
    max_ranks=8,
    max_layers=3,
    gates=["batch_priority({k})"],
    capacities=UNORDERED,
)
GROUPED = [f"group = {group}" for group in GROUPS]
CHOOSING = ["expert_choice({k})", "expert_choice(0.7)", "expert_choice(1.3)"]
WORDS["expert_choice"] = specs(max_ranks=8, max_layers=3, gates=CHOOSING, balances=["[]"], capacities=GROUPED)
WORDS["base"] = specs(max_ranks=8, max_layers=3, gates=["base"], balances=["[]", "[z_loss(0.01)]"], capacities=GROUPED)
WORDS["soft"] = specs(max_ranks=8, max_layers=3, gates=["soft(4)", "soft(8)"], balances=["[]"], capacities=[""])
WORDS["smear"] = specs(max_ranks=8, max_layers=3, gates=["smear"], balances=["[]"], capacities=[""])
"""For each word, Specs that have it."""


@examples(5, 300)
@given(st.one_of(list(WORDS.values())))
def test_every_plan_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec, float32=False)


KINDS = (
    ("", ", order = random"),
    ("", ", order = priority"),
    ("", ", order = weight"),
    ("", ", order = token"),
    ("gate = batch_priority(2)", ""),
    ("overflow = reroute", ", order = priority"),
    ("gate = switch; overflow = reroute", ""),
    ("overflow = pad", ""),
)
"""Words of a layer and of its capacity."""
ROWS = [
    *(
        f"moe {{ gate = {gate}; balance = []; {group} }}"
        for gate in ("expert_choice(2)", *CHOOSING[1:])
        for group in GROUPED
    ),
    *(f"moe {{ gate = base; balance = [z_loss(0.01)]; {group} }}" for group in GROUPED),
    *(f"moe {{ gate = {gate}; balance = [] }}" for gate in ("soft(4)", "smear")),
]
"""Layers whose gates decide the rows themselves and take no capacity."""


def queues() -> list[str]:
    """A layer for each two of a kind, a capacity and a group, in `make test-all` for each three."""
    sizes = len(KINDS), len(FACTORS), len(GROUPS)
    found = []
    for kind, factor, group in itertools.product(*map(range, sizes)) if extent.everything else covering(*sizes):
        words, order = KINDS[kind]
        if words != "overflow = pad" or "dynamic" not in FACTORS[factor]:
            found.append(f"moe {{ {words}; capacity = {FACTORS[factor].format(order)}; group = {GROUPS[group]} }}")
    return found


DEGREES: list[dict[str, Any]] = [
    {"tp": 2, "ep": 4, "zero": 1, "microbatches": 2},
    {"tp": 4, "ep": 2, "sequence_parallel": False, "recompute": "experts"},
    {"tp": 2, "ep": 2, "zero": 3, "ranks": 8, "dtype": "bf16"},
]


@pytest.mark.parametrize(("first", "degrees"), diagonals(range(len(DEGREES)), DEGREES))
def test_plans_with_tp_and_ep_equal_the_unsharded_model(first: int, degrees: dict[str, Any]) -> None:
    """Every third layer of all that there are."""
    require_equal(moe_plan(layers=[*queues(), *ROWS][first :: len(DEGREES)], batch=16, **degrees))

"""Random models with the gates and capacities that look at whole routing groups: plans equal the unsharded model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import specs

from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.passes.pipeline import compile_program
from moec.runtime.verify.verification import verify

GROUPS = ("sequence", "batch", "rank")
FACTORS = ("factor(0.6{})", "factor(0.5, eval = 0.9{})", "dynamic(max = 0.8{})", "factor(1.0, min = 2{})")
ORDERED = {
    order: [f"capacity = {factor.format(f', order = {order}')}; group = {g}" for factor in FACTORS for g in GROUPS]
    for order in ("random", "priority")
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

RANKS: dict[str, Callable[[int, int], bool]] = {
    "tp": lambda tp, ep: tp > 1,
    "ep": lambda tp, ep: ep > 1,
    "tp and ep": lambda tp, ep: tp > 1 and ep > 1,
}
"""Few random Specs have these degrees unless they are asked for."""

UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def with_degrees(word: str, ranks: str) -> st.SearchStrategy[Spec]:
    """The Specs of a word in which tensor or expert parallelism has several ranks."""

    def fits(spec: Spec) -> bool:
        program = compile_program(spec, "place").program
        dense, *experts = program.meshes
        return RANKS[ranks](dense.size("tp"), max((mesh.size("ep") for mesh in experts), default=1))

    return WORDS[word].filter(fits)


def verify_some(word: str, ranks: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=UNCHECKED)
    @given(with_degrees(word, ranks))
    def check(spec: Spec) -> None:
        report = verify(compile_source(spec), float32=False)
        assert report.ok, report

    check()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("word", WORDS)
def test_every_plan_equals_the_unsharded_model(word: str, ranks: str) -> None:
    verify_some(word, ranks, examples=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("word", WORDS)
def test_every_plan_equals_the_unsharded_model_at_length(word: str, ranks: str) -> None:
    verify_some(word, ranks, examples=9)

"""Random models with options of gates: every plan equals the unsharded model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import moe_plan
from random_specs import specs

from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.runtime.verify.verification import verify

EVERY_TERM = ["[]", "[switch_loss(0.1)]", "[switch_loss(0.1), z_loss(0.01)]"]

WORDS: dict[str, Sequence[str]] = {
    "scale": ["topk({k}, scale = 2.5)", "topk({k}, score = sigmoid, normalize = true, scale = 0.3)"],
}
"""Gates by the word that they show."""


def drawn(word: str) -> st.SearchStrategy[Spec]:
    return specs(max_ranks=8, max_layers=3, gates=WORDS[word], balances=EVERY_TERM)


def examples(number: int) -> settings:
    return settings(
        max_examples=number, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )


def require_verified(word: str, number: int) -> None:
    @examples(number)
    @given(drawn(word))
    def check(spec: Spec) -> None:
        report = verify(compile_source(spec), float32=False)
        assert report.ok, report

    check()


@pytest.mark.parametrize("word", WORDS)
def test_plans_with_options_of_gates_equal_the_unsharded_model(word: str) -> None:
    require_verified(word, 3)


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_many_plans_with_options_of_gates_equal_the_unsharded_model(word: str) -> None:
    require_verified(word, 25)


DEGREES: list[dict[str, Any]] = [
    {"ep": 4, "zero": 1},
    {"ep": 2, "tp": 2, "model": "embedding = tokens(padding = 3)"},
    {"ep": 2, "tp": 4, "ranks": 8, "sequence_parallel": False, "recompute": "layer"},
    {"ep": 4, "tp": 2, "dtype": "bf16", "microbatches": 2, "zero": 3, "recompute": "experts"},
]


@pytest.mark.parametrize("word", WORDS)
def test_plans_with_tp_and_ep_equal_the_unsharded_model(word: str) -> None:
    for gate, degrees in zip(itertools.cycle(WORDS[word]), DEGREES[1:3], strict=False):
        report = verify(moe_plan(gate=gate.replace("{k}", "2"), **degrees), float32=False)
        assert report.ok, (gate, degrees, report)


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_plans_equal_the_unsharded_model_in_their_own_dtype_too(word: str, degrees: dict[str, Any]) -> None:
    for gate in WORDS[word]:
        report = verify(moe_plan(gate=gate.replace("{k}", "2"), **degrees))
        assert report.ok, (gate, report)

"""Plans of models with each kind of expert, on random clusters, equal the unsharded model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import specs

from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.runtime.verify.verification import verify

DRAWS: dict[str, st.SearchStrategy[Spec]] = {
    "clamp and alpha": specs(
        max_ranks=8,
        max_layers=3,
        experts_of=[
            "swiglu(8, bias = true, clamp = 0.02, alpha = 1.7)",
            "swiglu(7, clamp = 0.01)",
            "swiglu(6, alpha = 2)",
        ],
        ffns=["swiglu({0}, clamp = 0.03, alpha = 1.702)"],
        paths=["", "shared = swiglu({0}, alpha = 1.5, gated = true)", "residual = swiglu({1}, clamp = 0.01)"],
    ),
    "linear": specs(
        max_ranks=8,
        max_layers=3,
        experts_of=["linear", "linear(bias = true)"],
        ffns=["linear(bias = true)"],
        paths=["", "shared = linear(gated = true)", "residual = linear(bias = true); shared = linear"],
    ),
    "lora": specs(
        max_ranks=8,
        max_layers=3,
        experts_of=["lora(3)", "lora(2, alpha = 5)"],
        ffns=["lora(3, alpha = 6)"],
        paths=["", "shared = swiglu({0}, gated = true)", "residual = lora(2); shared = lora(3, alpha = 1)"],
    ),
}
"""Clamps lie inside of what the small initial weights give."""

quiet = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def equal_to_the_unsharded_model(words: str, examples: int) -> None:
    @settings(quiet, max_examples=examples)
    @given(DRAWS[words])
    def check(spec: Spec) -> None:
        report = verify(compile_source(spec), float32=False)
        assert report.ok, report

    check()


@pytest.mark.parametrize("words", DRAWS)
def test_plans_with_experts_of_each_kind_equal_the_unsharded_model(words: str) -> None:
    equal_to_the_unsharded_model(words, 3)


@pytest.mark.slow
@pytest.mark.parametrize("words", DRAWS)
def test_plans_with_experts_of_each_kind_equal_the_unsharded_model_at_length(words: str) -> None:
    equal_to_the_unsharded_model(words, 25)

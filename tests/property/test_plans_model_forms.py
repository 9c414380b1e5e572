"""Random models with words of `model` that change what a layer adds: every plan equals the unsharded model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import specs
from support.plans import moe_plan

from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.runtime.verify.verification import verify

WORDS = {
    "multipliers": [
        "residual_multiplier = 0.22; embedding = tokens(multiplier = 12.0, logits_multiplier = 0.1)",
        "residual_multiplier = 3.5; embedding = tokens(tied = true, multiplier = 0.5, positions = learned)",
        "embedding = tokens(logits_multiplier = 4.0, padding = 31, separator = 2); norm = layer_norm()",
    ],
    "post": ["norm_place = post; norm = layer_norm()", "norm_place = post; residual_multiplier = 0.5"],
    "res_post": ["norm_place = res_post", "norm_place = res_post; norm = layer_norm(); residual_multiplier = 0.5"],
    "parallel_residual": [
        "parallel_residual = one_norm",
        "parallel_residual = two_norms; norm = layer_norm(); residual_multiplier = 0.5",
    ],
    "sandwich": ["norm_place = sandwich", "norm_place = sandwich; norm = layer_norm(bias = false)"],
}


def drawn(word: str, data: st.DataObject, max_ranks: int) -> Spec:
    return data.draw(specs(max_ranks=max_ranks, max_layers=3, models=WORDS[word]))


@pytest.mark.parametrize("word", WORDS)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_plan_equals_the_unsharded_model(word: str, data: st.DataObject) -> None:
    report = verify(compile_source(drawn(word, data, 8)), float32=False)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_many_plans_equal_the_unsharded_model(word: str, data: st.DataObject) -> None:
    report = verify(compile_source(drawn(word, data, 16)), float32=False)
    assert report.ok, report


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("word", WORDS)
def test_plans_with_tp_and_ep_equal_the_unsharded_model(word: str, sequence_parallel: bool) -> None:
    plan = moe_plan(model=WORDS[word][0], ranks=8, tp=2, ep=4, sequence_parallel=sequence_parallel, zero=2)
    report = verify(plan, float32=False)
    assert report.ok, report

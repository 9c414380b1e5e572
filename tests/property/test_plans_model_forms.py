"""Random models with words of `model` that change what a layer adds: every plan equals the unsharded model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from random_specs import specs
from support.combinations import diagonals
from support.examples import examples
from support.plans import moe_plan
from support.verified import require_equal

from moec.grammar.spec import Spec

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


FORMS = list(itertools.chain(*WORDS.values()))


@examples(3, 125)
@given(specs(max_ranks=16, max_layers=3, models=FORMS))
def test_every_plan_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec, float32=False)


@pytest.mark.parametrize(("model", "sequence_parallel"), diagonals(FORMS, [True, False]))
def test_plans_with_tp_and_ep_equal_the_unsharded_model(model: str, sequence_parallel: bool) -> None:
    require_equal(moe_plan(model=model, tp=2, ep=4, sequence_parallel=sequence_parallel, zero=2))

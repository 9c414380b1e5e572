"""Random models on random clusters with each kind of attention: every plan equals the unsharded model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from random_specs import MODELS, specs
from support.examples import examples
from support.plans import moe_plan
from support.verified import require_equal

from moec.grammar.spec import Spec

KINDS = {
    "causal = false": [
        "mha(heads = 4, causal = false)",
        "gqa(heads = 4, kv_heads = 2, rope = rope(), causal = false, qk_norm = projection)",
    ],
    "fraction, interleaved": [
        "mha(heads = 4, head_dim = 4, rope = rope(fraction = 0.5))",
        "gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope(fraction = 0.7, interleaved = true), bias = all)",
        "gqa(heads = 4, kv_heads = 1, rope = rope(interleaved = true), qk_norm = head)",
    ],
    "scaling": [
        f"mha(heads = 4, head_dim = 4, rope = rope(theta = 100, scaling = {scaling}))"
        for scaling in (
            "linear(2)",
            "ntk(2, original = 3)",
            "yarn(4, original = 6, mscale = 0.7, mscale_all = 1)",
            "llama3(8, original = 64)",
            "longrope(short = [1, 1.5], long = [1, 4], original = 4)",
        )
    ],
    "multiplier": [
        "mha(heads = 4, multiplier = 0.8)",
        "gqa(heads = 4, kv_heads = 2, rope = rope(), multiplier = 0.1, qk_norm = head)",
    ],
    "clip": [
        "mha(heads = 4, clip = 0.02)",
        "gqa(heads = 4, kv_heads = 2, rope = rope(), clip = 0.04, bias = qkv, qk_norm = projection)",
    ],
    "window": [
        "mha(heads = 4, window = 3)",
        "gqa(heads = 4, kv_heads = 2, rope = rope(), window = 2, causal = false, qk_norm = head)",
    ],
    "sinks": [
        "mha(heads = 4, sinks = true)",
        "gqa(heads = 4, kv_heads = 2, rope = rope(), sinks = true, window = 3, qk_norm = projection)",
        "gqa(heads = 4, kv_heads = 1, sinks = true, causal = false, multiplier = 0.5, bias = all)",
    ],
    "mla": [
        f"mla(heads = 4, kv_rank = 6, nope_dim = 3, rope_dim = 2, {more})"
        for more in (
            "value_dim = 4, q_rank = 5, rope = rope(interleaved = true)",
            "value_dim = 6, rope = rope(scaling = yarn(4, original = 6, mscale_all = 1)), bias = all",
            "value_dim = 5, q_rank = 3, bias = qkv, sinks = true, window = 3",
        )
    ],
}
"""Attentions with 4 heads, by the word that they show."""

IN_CONTEXT = [f"context = 16; {model}" for model in MODELS]
"""A context longer than the sequences, so that a window may be longer than these too."""


DEGREES: list[dict[str, Any]] = [
    {"tp": 2, "ep": 4, "zero": 1, "microbatches": 2},
    {"tp": 4, "ep": 2, "sequence_parallel": False, "zero": 3, "recompute": "layer"},
]


@pytest.mark.parametrize("place", range(2))
def test_plans_of_every_kind_equal_the_unsharded_model(place: int) -> None:
    """One plan has a layer of each kind; the other one of each other kind, with other degrees."""
    kinds = [kind for every in KINDS.values() for kind in every][place::2]
    layers = [f"attention = {kind}" for kind in kinds]
    require_equal(moe_plan(layers=layers, model="context = 16", **DEGREES[place]))


@examples(3, 200)
@given(specs(max_ranks=8, attentions=list(itertools.chain(*KINDS.values())), models=IN_CONTEXT))
def test_every_plan_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec, float32=False)

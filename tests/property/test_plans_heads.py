"""Random models with mixtures of attention heads on random clusters: every plan equals the unsharded model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import MODELS, specs

from moec.driver import compile as compile_source
from moec.runtime.verify.verification import verify

KINDS = {
    "moa": [
        "moa(heads = 4, experts = 5, gate = topk(2), normalize = true, balance = [switch_loss(0.1), z_loss(0.01)])",
        "moa(heads = 4, kv_heads = 2, experts = 3, gate = topk(2, order = after), rope = rope(), bias = all)",
        "moa(heads = 4, kv_heads = 1, head_dim = 6, experts = 4, gate = topk(3, score = sigmoid, bias = learned), "
        "qk_norm = head, window = 3, balance = [switch_loss(0.1)], group = batch)",
        "moa(heads = 4, head_dim = 2, experts = 1, gate = topk(1), clip = 0.04, causal = false)",
        "moa(heads = 4, experts = 7, gate = topk(2, jitter = 0.2, noise = 0.1), causal = false, multiplier = 0.3)",
    ],
    "moa, other gates": [
        "moa(heads = 4, experts = 4, gate = switch(jitter = 0.3), balance = [z_loss(0.1)])",
        "moa(heads = 4, kv_heads = 2, experts = 5, gate = gshard, rope = rope(), balance = [switch_loss(0.1)])",
        "moa(heads = 4, experts = 5, gate = noisy_topk(2), balance = [z_loss(0.1)], bias = qkv)",
        "moa(heads = 4, kv_heads = 1, experts = 3, gate = sparsemixer(2, jitter = 0.5), normalize = true)",
        "moa(heads = 4, experts = 6, gate = hash(2, seed = 5), qk_norm = head)",
        "moa(heads = 4, experts = 4, gate = dselect_k(2, gamma = 0.05, entropy = 0.1), balance = [switch_loss(0.1)])",
        "moa(heads = 4, experts = 5, gate = attention_router(2), balance = [switch_loss(0.1)], window = 2)",
        "moa(heads = 4, kv_heads = 2, experts = 3, gate = dense, rope = rope(), balance = [z_loss(0.1)])",
    ],
}
"""Attentions with 4 heads in a group."""

IN_CONTEXT = [f"context = 16; {model}" for model in MODELS]


@pytest.mark.parametrize("word", KINDS)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_plan_equals_the_unsharded_model(word: str, data: st.DataObject) -> None:
    spec = data.draw(specs(max_ranks=4, max_layers=3, attentions=KINDS[word], models=IN_CONTEXT))
    report = verify(compile_source(spec), float32=False)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("word", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_plan_equals_the_unsharded_model_at_length(word: str, data: st.DataObject) -> None:
    spec = data.draw(specs(max_ranks=16, attentions=KINDS[word], models=IN_CONTEXT))
    report = verify(compile_source(spec))
    assert report.ok, report

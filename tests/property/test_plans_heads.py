"""Random models with mixtures of attention heads on random clusters: every plan equals the unsharded model."""

from __future__ import annotations

import itertools

from hypothesis import given
from random_specs import MODELS, specs
from support.examples import examples
from support.plans import moe_plan
from support.verified import require_equal

from moec.grammar.spec import Spec

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


def test_plans_of_every_kind_equal_the_unsharded_model() -> None:
    """A layer of each kind in one plan, with its heads over two ranks of tp."""
    layers = [f"attention = {kind}" for kind in itertools.chain(*KINDS.values())]
    require_equal(moe_plan(layers=layers, model="context = 16", tp=2, zero=1))


@examples(3, 50)
@given(specs(max_ranks=8, max_layers=3, attentions=list(itertools.chain(*KINDS.values())), models=IN_CONTEXT))
def test_every_plan_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec)

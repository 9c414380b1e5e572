"""Replayed routes against the handwritten model with forced choices (R3, arXiv 2510.11370)."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles.same import batch, pair, require_same
from oracles.specs import BATCH, SEQUENCE, VOCAB
from support.forced_routes import force, random_routes

from moec.driver import to_spec
from moec.grammar.spec import Spec

ORACLE_OF = {
    "train": "replay",
}

MODES = list(itertools.product(("softmax", "sigmoid"), ("before", "after"), ("false", "true")))


def spec_of(gate: str, *, beside: str = "", embedding: str = "tokens()") -> Spec:
    """A dense layer between two mixtures, of 6 experts with `gate` and of 4 with `switch()`."""
    return to_spec(f"""
        model "small" {{
          vocab = {VOCAB}; dim = 16; depth = 3; dtype = fp32; embedding = {embedding}
          layers {{ attention = gqa(heads = 4, kv_heads = 2, rope = rope()); ffn = gelu(20) }}
          layers 0 {{ moe {{ experts = 6 * swiglu(12); gate = {gate}
                             balance = [switch_loss(0.3), z_loss(0.05)]; {beside} }} }}
          layers 2 {{ moe {{ experts = 4 * gelu(12, bias = true); gate = switch(); shared = relu(8) }} }}
        }}
        cluster "here" {{ device = cpu; level "process" {{ size = 1 }} }}
        train {{ batch = {BATCH}; sequence = {SEQUENCE}; replay = true }}
    """)


@pytest.mark.parametrize("none", [0.0, 0.3])
@pytest.mark.parametrize(("score", "order", "normalize"), MODES)
def test_given_choices_replace_the_gates_and_the_router_learns_from_their_weights(
    score: str, order: str, normalize: str, none: float
) -> None:
    compare(spec_of(f"topk(2, score = {score}, order = {order}, normalize = {normalize})"), none)


@pytest.mark.parametrize("none", [0.0, 0.3])
def test_a_capacity_applies_to_given_choices(none: float) -> None:
    compare(spec_of("topk(3, normalize = true)", beside="capacity = factor(0.5)"), none)


def compare(spec: Spec, none: float) -> None:
    """Logits, loss and every gradient of one batch with random routes."""
    ours, plain, generator = pair(spec)
    routes = random_routes((BATCH, SEQUENCE), [6, 4], [ours.takes.k[0], 1], none=none)
    output = require_same(ours, force(plain, routes), *batch(generator), routes=routes)
    assert output.routes is not None
    assert torch.equal(output.routes, routes)
    assert ours.get_parameter("layers.0.moe.gate.weight").grad.abs().max() > 1e-6

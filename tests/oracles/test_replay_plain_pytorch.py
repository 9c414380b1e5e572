"""Replayed routes against the handwritten model with forced choices (R3, arXiv 2510.11370)."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles.specs import BATCH, SEQUENCE, VOCAB
from plain_moe import PlainModel
from plain_weights import plain_state_dict
from support.forced_routes import force, random_routes

from moec.driver import to_spec
from moec.grammar.spec import Spec
from moec.runtime.job.reference import reference

ORACLE_OF = {
    "train": "replay",
}

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
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
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    plain.load_state_dict(plain_state_dict(dict(ours.named_parameters())))
    tokens, labels = (torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    routes = random_routes((BATCH, SEQUENCE), [6, 4], [ours.takes.k[0], 1], none=none)
    output, (logits, loss) = ours(tokens, labels, routes=routes), force(plain, routes)(tokens, labels)
    assert output.routes is not None
    assert torch.equal(output.routes, routes)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    torch.testing.assert_close(output.loss, loss, **TIGHT)
    output.loss.backward()
    loss.backward()
    found = plain_state_dict({name: parameter.grad for name, parameter in ours.named_parameters()})
    assert found["layers.0.moe.gate.weight"].abs().max() > 1e-6
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")

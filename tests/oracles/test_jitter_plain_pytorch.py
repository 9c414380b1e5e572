"""Jitter against the handwritten model: Philox in Python's integers gives each factor of each router's input."""

from __future__ import annotations

import pytest
import torch
from oracles.plain_philox import SEED, STEP, uniform
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel, PlainMoe
from plain_weights import plain_state_dict
from torch import Tensor

from moec.runtime.job.reference import reference

ORACLE_OF = {
    "topk": "jitter",
    "switch": "jitter",
}

AMOUNT = 0.4
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * swiglu(20); gate = {gate}; balance = [switch_loss(0.3)] }}
    }}
"""


def factors(batch: int, sequence: int, dim: int, layer: int) -> Tensor:
    """What each element of the router's input of `layer` is multiplied by: `[batch, sequence, dim]`."""
    return 1 + AMOUNT * (2 * uniform(batch, sequence, dim, layer, 0) - 1)


class JitteredMoe(PlainMoe):
    """`PlainMoe` whose router's input is multiplied by `factors`."""

    number: int

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x * factors(*x.shape, self.number))


@pytest.mark.parametrize("gate", [f"topk(2, jitter = {AMOUNT})", f"switch(jitter = {AMOUNT})"])
def test_reference_equals_the_handwritten_model(gate: str) -> None:
    spec = small_spec(LAYERS.format(gate=gate), dim=22)
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    tokens, labels = (torch.randint(VOCAB, (3, 13), generator=generator) for _ in range(2))
    plain.load_state_dict(plain_state_dict(dict(ours.named_parameters())))
    for number, layer in enumerate(plain.layers):
        layer.moe.__class__, layer.moe.number = JitteredMoe, number
    ours.set(seed=SEED, step=STEP)
    output, (logits, loss) = ours(tokens, labels), plain(tokens, labels)
    tight = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(output.logits, logits, **tight)
    torch.testing.assert_close(output.loss, loss, **tight)
    output.loss.backward()
    loss.backward()
    found = plain_state_dict({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, **tight, msg=lambda text, name=name: f"{name}: {text}")

"""Jitter against the handwritten model: Philox in Python's integers gives each factor of each router's input."""

from __future__ import annotations

import pytest
from oracles.plain_philox import SEED, STEP, uniform
from oracles.same import batch, pair, require_same
from oracles.specs import small_spec
from plain_moe import PlainMoe
from torch import Tensor

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
    ours, plain, generator = pair(small_spec(LAYERS.format(gate=gate), dim=22))
    for number, layer in enumerate(plain.layers):
        layer.moe.__class__, layer.moe.number = JitteredMoe, number
    ours.set(seed=SEED, step=STEP)
    require_same(ours, plain, *batch(generator))

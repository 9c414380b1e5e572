"""The gate `gshard` against algorithm 1 of its paper, token by token."""

from __future__ import annotations

import pytest
import torch
from oracles.gate_oracle import OracleMoe, Routed, compare
from oracles.plain_philox import uniform
from torch import Tensor

ORACLE_OF = {
    "gshard": "",
}

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * swiglu(20); gate = gshard; balance = [switch_loss(0.3), z_loss(0.1)]; {beside} }}
    }}
"""


class GShardMoe(OracleMoe):
    """Lepikhin et al. 2020, algorithm 1, without its counts."""

    def route(self, x: Tensor) -> Routed:
        logits = self.logits(x)
        gates = logits.softmax(-1)
        drawn = uniform(*x.shape[:2], 1, self.number)[..., 0]
        best, experts = gates.topk(2, -1)
        (first, second), (e1, e2) = best.unbind(-1), experts.unbind(-1)
        g1, g2 = first / (first + second), second / (first + second)
        taken = (2 * g2 > drawn) | torch.tensor(not self.training)
        e2 = torch.where(taken, e2, -1)
        self.refused = int((~taken).sum())
        return Routed(torch.stack([g1, g2], -1), torch.stack([e1, e2], -1), logits, gates)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("beside", ["", "capacity = factor(0.75)", "capacity = dynamic(max = 0.75); group = batch"])
def test_reference_equals_algorithm_1(beside: str, training: bool) -> None:
    plain = compare(GShardMoe, LAYERS.format(beside=beside), training=training)
    refused = [layer.moe.refused for layer in plain.layers]
    assert all(0 < number < 39 for number in refused) if training else refused == [0, 0]


def test_padding_takes_no_part() -> None:
    compare(GShardMoe, LAYERS.format(beside="capacity = factor(1.0); group = batch"), padding=3)

"""The gate `noisy_topk` against equations 3 to 5 of its paper, its noise drawn by Philox in Python's integers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles.gate_oracle import OracleMoe, Routed, compare, linear
from oracles.plain_philox import normal
from support.combinations import pairs
from torch import Tensor, nn

ORACLE_OF = {
    "noisy_topk": "k",
    "load_loss": "",
    "importance_loss": "",
}

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 6 * swiglu(20); gate = noisy_topk({k}); balance = [{balance}]; {beside} }}
    }}
"""


class Gate(nn.Module):
    """W_g and W_noise, named as moec names them."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.noise = linear(weight.shape[1], weight.shape[0])


class NoisyMoe(OracleMoe):
    """Shazeer et al. 2017, eq. 3 to 5: softmax over all experts of the k largest of H, −∞ elsewhere."""

    def prepare(self) -> None:
        self.gate = Gate(self.gate.weight)

    def route(self, x: Tensor) -> Routed:
        clean, deviation = F.linear(x, self.gate.weight), F.softplus(self.gate.noise(x))
        noisy = clean
        if self.training:
            noisy = clean + normal(*x.shape[:2], self.num_experts, self.number) * deviation
        experts = noisy.topk(self.topk.k, -1).indices
        kept = torch.full_like(noisy, -torch.inf).scatter(-1, experts, noisy.gather(-1, experts))
        more = {"clean": clean, "deviation": deviation}
        return Routed(kept.softmax(-1).gather(-1, experts), experts, noisy, noisy.softmax(-1), more)


@pytest.mark.parametrize(
    ("k", "beside", "training"), pairs([1, 2, 6], ["", "capacity = factor(0.75); group = batch"], [True, False])
)
def test_reference_equals_the_equations(beside: str, k: int, training: bool) -> None:
    balance = "switch_loss(0.3), z_loss(0.1)"
    compare(NoisyMoe, LAYERS.format(k=k, beside=beside, balance=balance), training=training)


def test_padding_takes_no_part() -> None:
    compare(NoisyMoe, LAYERS.format(k=2, beside="group = batch", balance="switch_loss(0.3)"), padding=3)


@pytest.mark.parametrize(
    ("k", "group", "training", "padding"), pairs([1, 2, 5], ["sequence", "batch"], [True, False], [None, 3])
)
def test_loads_equal_the_equations(group: str, k: int, training: bool, padding: int | None) -> None:
    layers = LAYERS.format(k=k, beside=f"group = {group}", balance="load_loss(0.3), importance_loss(0.1)")
    compare(NoisyMoe, layers, training=training, padding=padding)

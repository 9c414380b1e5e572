"""The gate `dselect_k` against the definition of its paper, expert by expert."""

from __future__ import annotations

import pytest
import torch
from oracles.gate_oracle import OracleMoe, Routed, compare, linear
from torch import Tensor, nn

ORACLE_OF = {
    "dselect_k": "k gamma entropy",
}

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{
        experts = {experts} * swiglu(20); {beside}
        gate = dselect_k({k}, gamma = {gamma}, entropy = {entropy})
      }}
    }}
"""


class Gate(nn.Module):
    """W (codes) and G, named as moec names them; one selector has no G."""

    def __init__(self, dim: int, k: int, bits: int) -> None:
        super().__init__()
        self.codes = linear(dim, k * bits)
        if k > 1:
            self.weight = nn.Parameter(torch.zeros(k, dim, dtype=torch.float64))


def smooth_step(t: Tensor, gamma: float) -> Tensor:
    between = -2 / gamma**3 * t**3 + 3 / (2 * gamma) * t + 0.5
    return torch.where(t <= -gamma / 2, 0.0, torch.where(t >= gamma / 2, 1.0, between))


class DSelectMoe(OracleMoe):
    """Hazimeh et al. 2021: q = Σ softmax(Gx)ᵢ r(Wᵢx), and Ω = −Σᵢ ⟨r, log r⟩."""

    zeros = 0

    def prepare(self) -> None:
        self.bits = self.num_experts.bit_length() - 1
        self.gate = Gate(self.gate.weight.shape[1], self.topk.k, self.bits)

    def route(self, x: Tensor) -> Routed:
        k = self.topk.k
        steps = smooth_step(self.gate.codes(x), self.topk.gamma)
        shares = (x @ self.gate.weight.T).softmax(-1) if k > 1 else torch.ones(*x.shape[:2], 1, dtype=x.dtype)
        weights, entropy = [], torch.zeros(x.shape[:2], dtype=x.dtype)
        for expert in range(self.num_experts):
            total = torch.zeros(x.shape[:2], dtype=x.dtype)
            for selector in range(k):
                r = torch.ones(x.shape[:2], dtype=x.dtype)
                for bit in range(self.bits):
                    step = steps[..., selector * self.bits + bit]
                    r = r * (step if expert >> bit & 1 else 1 - step)
                entropy = entropy - torch.where(r > 0, r * r.clamp_min(1e-300).log(), 0.0)
                total = total + shares[..., selector] * r
            weights.append(total)
        q = torch.stack(weights, -1)
        self.zeros = int((q == 0).sum())
        experts = torch.where(q == 0, -1, torch.arange(self.num_experts))
        return Routed(q, experts, q, q, {"entropy": entropy})

    def balanced(self, found: Routed, x: Tensor) -> Tensor | float:
        mean = found.more["entropy"][self.real].mean()
        return super().balanced(found, x) + self.topk.entropy * mean


CASES = [(2, 1, 1.0), (4, 2, 1.0), (8, 3, 2.0), (8, 2, 0.02)]


@pytest.mark.parametrize(("experts", "k", "gamma"), CASES)
@pytest.mark.parametrize("beside", ["", "capacity = factor(0.5); group = batch; balance = [importance_loss(0.1)]"])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_reference_equals_the_definition(entropy: float, beside: str, experts: int, k: int, gamma: float) -> None:
    if not entropy and "balance" not in beside:
        beside += "; balance = [switch_loss(0.1)]"
    layers = LAYERS.format(experts=experts, k=k, gamma=gamma, entropy=entropy, beside=beside)
    plain = compare(DSelectMoe, layers)
    if gamma < 0.1:
        assert all(layer.moe.zeros for layer in plain.layers)


def test_padding_takes_no_part() -> None:
    layers = LAYERS.format(experts=4, k=2, gamma=1.0, entropy=0.3, beside="balance = [switch_loss(0.1)]")
    compare(DSelectMoe, layers, padding=3)

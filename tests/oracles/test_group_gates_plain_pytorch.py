"""Gates that choose for whole routing groups against handwritten models of their papers."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.same import batch, copy_parameters, enlarge, require_same
from oracles.specs import small_spec
from plain_moe import PlainModel, PlainMoe
from torch import Tensor, nn
from torch.func import functional_call

from moec.runtime.host.reference import reference

ORACLE_OF = {
    "expert_choice": "factor",
    "base": "",
    "soft": "slots",
    "smear": "",
}

EXPERTS = 5
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * {body}; gate = {gate}; {beside} }}
    }}
"""


class GroupMoe(PlainMoe):
    """`PlainMoe` whose `mixed` gives the mixture of one group's tokens [T, dim], from all logits [T, E]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        whole = x if self.group == "sequence" else x.reshape(1, -1, x.shape[-1])
        mixed = torch.stack([self.mixed(group, self.logits(group)) for group in whole]).view_as(x)
        return self.with_dense_paths(x, mixed), 0.0

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        """The mixture of one routing group."""
        raise NotImplementedError


class ExpertChoiceMoe(GroupMoe):
    """Zhou et al. 2022, section 3.2: S = softmax(X W), and the k best rows of each column of S."""

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        scores = logits.softmax(-1)
        k = math.ceil(float(self.topk.factor) * len(x) / EXPERTS)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            ranked = sorted(range(len(x)), key=lambda t, e=number: -float(scores[t, e].detach()))
            for token in ranked[:k]:
                out[token] = out[token] + scores[token, number] * expert(x[token])
        return out


def compare(gate: str, beside: str, body: str, kind: type[GroupMoe]) -> None:
    """The reference and the handwritten model, of the same parameters, in training and in evaluation."""
    spec = small_spec(LAYERS.format(gate=gate, body=body, beside=beside))
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    enlarge(ours)
    if kind is SoftMoe:
        for layer in plain.layers:
            layer.moe.gate = nn.Linear(24, EXPERTS * layer.moe.topk.slots, bias=False, dtype=torch.float64)
    copy_parameters(ours, plain)
    for layer in plain.layers:
        layer.moe.__class__ = kind
    require_same(ours, plain, *batch(), evaluated=True)


@pytest.mark.parametrize("factor", ["0.5", "2.0", "1.7", "9.0"])
@pytest.mark.parametrize("beside", ["", "group = batch; shared = swiglu(12, gated = true)"])
def test_experts_choose_their_best_tokens(factor: str, beside: str) -> None:
    factor = str(min(float(factor), float(EXPERTS)))
    compare(f"expert_choice({factor})", beside, "swiglu(8)", ExpertChoiceMoe)


class BaseMoe(GroupMoe):
    """Lewis et al. 2021, eq. 1 and 2: the best of all balanced assignments, by trying loads token by token."""

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        chosen = best_assignment(logits.detach()) if self.training else logits.argmax(-1).tolist()
        rows = [torch.sigmoid(logits[t, e]) * self.experts[e](x[t]) for t, e in enumerate(chosen)]
        return torch.stack(rows)


def best_assignment(scores: Tensor) -> list[int]:
    """The balanced assignment with the largest sum of scores [T, E]: dynamic programming over the experts' loads."""
    tokens, num_experts = scores.shape
    least, most = tokens // num_experts, -(-tokens // num_experts)
    best: dict[tuple[int, ...], tuple[float, list[int]]] = {(0,) * num_experts: (0.0, [])}
    for row in scores.tolist():
        following: dict[tuple[int, ...], tuple[float, list[int]]] = {}
        for loads, (total, chosen) in best.items():
            for e in range(num_experts):
                after = (*loads[:e], loads[e] + 1, *loads[e + 1 :])
                if loads[e] < most and (after not in following or total + row[e] > following[after][0]):
                    following[after] = (total + row[e], [*chosen, e])
        best = following
    return max(found for loads, found in best.items() if min(loads) >= least)[1]


@pytest.mark.parametrize("beside", ["", "shared = swiglu(12, gated = true); residual = gelu(12)"])
def test_base_matches_tokens_with_experts(beside: str) -> None:
    compare("base", beside, "swiglu(8)", BaseMoe)


class SoftMoe(GroupMoe):
    """Puigcerver et al. 2023, eq. 1 to 3, slot by slot."""

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        slots, out = self.topk.slots, torch.zeros_like(x)
        combine = logits.exp() / logits.exp().sum(1, keepdim=True)
        for slot in range(logits.shape[1]):
            dispatch = logits[:, slot].exp() / logits[:, slot].exp().sum()
            given = sum(weight * token for weight, token in zip(dispatch, x, strict=True))
            out = out + combine[:, slot, None] * self.experts[slot // slots](given)
        return out


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("beside", ["", "shared = swiglu(12, gated = true); residual = gelu(12)"])
def test_soft_gives_experts_means_of_tokens_and_tokens_means_of_slots(beside: str, slots: int) -> None:
    compare(f"soft({slots})", beside, "swiglu(8)", SoftMoe)


class SmearMoe(GroupMoe):
    """Muqeeth et al. 2023, section 3: the experts' parameters, weighted by the routing of the mean token, make one."""

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        shares = self.logits(x.mean(0)).softmax(-1)
        of_experts = [dict(expert.named_parameters()) for expert in self.experts]
        merged = {n: sum(s * e[n] for s, e in zip(shares, of_experts, strict=True)) for n in of_experts[0]}
        return functional_call(self.experts[0], merged, (x,))


@pytest.mark.parametrize("body", ["swiglu(8)", "gelu(12, bias = true)"])
@pytest.mark.parametrize("beside", ["", "shared = swiglu(12, gated = true); residual = gelu(12)"])
def test_smear_merges_the_experts_of_a_sequence(beside: str, body: str) -> None:
    compare("smear", beside, body, SmearMoe)

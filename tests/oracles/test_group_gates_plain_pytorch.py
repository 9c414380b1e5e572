"""Gates that choose for whole routing groups against handwritten models of their papers."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel, PlainMoe
from plain_weights import plain_state_dict
from torch import Tensor, nn
from torch.func import functional_call

from moec.runtime.job.module import PlanModule
from moec.runtime.job.reference import reference

ORACLE_OF = {
    "expert_choice": "factor",
    "base": "",
    "soft": "slots",
    "smear": "",
}

EXPERTS, BATCH, SEQUENCE = 5, 3, 13
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * {body}; gate = {gate}; {beside} }}
    }}
"""
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


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


def both(gate: str, beside: str, body: str, kind: type[GroupMoe]) -> tuple[PlanModule, PlainModel]:
    """moec's reference and the handwritten model, with the same weights."""
    spec = small_spec(LAYERS.format(gate=gate, body=body, beside=beside))
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if kind is SoftMoe:
        for layer in plain.layers:
            layer.moe.gate = nn.Linear(24, EXPERTS * layer.moe.topk.slots, bias=False, dtype=torch.float64)
    plain.load_state_dict(plain_state_dict(dict(ours.named_parameters())))
    for layer in plain.layers:
        layer.moe.__class__ = kind
    return ours, plain


def assert_same(ours: PlanModule, plain: PlainModel) -> None:
    """The same logits, loss and gradients in training, and the same logits in evaluation."""
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    output, (logits, loss) = ours(tokens, labels), plain(tokens, labels)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    torch.testing.assert_close(output.loss, loss, **TIGHT)
    output.loss.backward()
    loss.backward()
    found = plain_state_dict({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens).logits, plain.eval()(tokens)[0], **TIGHT)


@pytest.mark.parametrize("factor", ["0.5", "2.0", "1.7", "9.0"])
@pytest.mark.parametrize("beside", ["", "group = batch; shared = swiglu(12, gated = true)"])
def test_experts_choose_their_best_tokens(factor: str, beside: str) -> None:
    factor = str(min(float(factor), float(EXPERTS)))
    assert_same(*both(f"expert_choice({factor})", beside, "swiglu(8)", ExpertChoiceMoe))


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
    assert_same(*both("base", beside, "swiglu(8)", BaseMoe))


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
    assert_same(*both(f"soft({slots})", beside, "swiglu(8)", SoftMoe))


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
    assert_same(*both("smear", beside, body, SmearMoe))

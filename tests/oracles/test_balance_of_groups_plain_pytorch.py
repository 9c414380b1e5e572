"""`sequence_loss` and `device_loss` against their papers' equations, in a handwritten model."""

from __future__ import annotations

import pytest
import torch
from oracles.optioned_moe import OptionedMoe, pair, require_equal
from oracles.specs import small_spec
from torch import Tensor

from moec.runtime.host.reference import reference

ORACLE_OF = {
    "sequence_loss": "",
    "switch_loss": "fractions",
    "device_loss": "groups",
}

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 6 * swiglu(20); gate = {gate}; balance = [{terms}]; group = {group} }}
    }}
"""
ALPHA, EXPERTS = 0.3, 6
GATES = {
    "softmax": "topk(2)",
    "sigmoid": "topk(3, score = sigmoid, normalize = true)",
    "groups": "topk(2, groups = 3, keep_groups = 1)",
    "deepseek v3": "topk(2, score = sigmoid, normalize = true, groups = 3, keep_groups = 2, bias = online(0.01))",
    "switch": "switch",
}


class BalancedBySequences(OptionedMoe):
    """DeepSeek-V3, equations 17 to 20."""

    def balance(self, logits: Tensor, chosen: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        k = chosen.shape[-1]
        for z in logits:
            s = z.sigmoid() if self.topk.score == "sigmoid" else z.softmax(-1)
            best = s.topk(k).indices
            f = torch.stack([(best == i).sum().double() * EXPERTS / (k * len(z)) for i in range(EXPERTS)])
            p = (s / s.sum(-1, keepdim=True)).mean(0)
            total = total + ALPHA * (f * p).sum()
        return total / len(logits)


@pytest.mark.parametrize("group", ["sequence", "batch"])
@pytest.mark.parametrize("gate", GATES)
def test_sequence_loss_is_deepseek_v3s(gate: str, group: str) -> None:
    spec = small_spec(LAYERS.format(gate=GATES[gate], terms=f"sequence_loss({ALPHA})", group=group))
    ours, plain = pair(spec, BalancedBySequences)
    for number, layer in enumerate(plain.layers):
        if gate == "deepseek v3":
            layer.moe.bias = torch.tensor([0.0, 2.0, -1.0, 0.5, 3.0, -2.0], dtype=torch.float64)
            ours.get_buffer(f"layers.{number}.moe.gate.bias").copy_(layer.moe.bias)
    require_equal(ours, plain)


class BalancedByScores(OptionedMoe):
    """Megatron's term: f of plain top-k of the scores, without biases and groups, over a micro-batch.

    Megatron-LM 0.16.1, `transformer/moe/moe_utils.py`, `compute_routing_scores_for_aux_loss` and
    `switch_load_balancing_loss_func`.
    """

    def balance(self, logits: Tensor, chosen: Tensor) -> Tensor:
        z, k = logits.flatten(0, 1), chosen.shape[-1]
        scores = z.softmax(-1) if self.topk.score == "softmax" else z.sigmoid() / z.sigmoid().sum(-1, keepdim=True)
        routing_map = torch.zeros_like(scores).scatter(1, scores.topk(k).indices, 1)
        tokens_per_expert, tokens = routing_map.sum(0), len(z)
        return ALPHA * EXPERTS / (k * tokens * tokens) * (scores.sum(0) * tokens_per_expert).sum()


@pytest.mark.parametrize("gate", GATES)
def test_switch_loss_of_scores_is_megatrons(gate: str) -> None:
    terms = f"switch_loss({ALPHA}, fractions = scores)"
    spec = small_spec(LAYERS.format(gate=GATES[gate], terms=terms, group="batch"))
    ours, plain = pair(spec, BalancedByScores)
    for number, layer in enumerate(plain.layers):
        if gate == "deepseek v3":
            layer.moe.bias = torch.tensor([0.0, 2.0, -1.0, 0.5, 3.0, -2.0], dtype=torch.float64)
            ours.get_buffer(f"layers.{number}.moe.gate.bias").copy_(layer.moe.bias)
    require_equal(ours, plain)


def test_sequence_loss_counts_the_scores_and_not_the_choices() -> None:
    """The switch loss counts the choices, which biases and groups change."""
    values = []
    for term in ("sequence_loss(1)", "switch_loss(1)", "switch_loss(1, fractions = scores)"):
        spec = small_spec(LAYERS.format(gate=GATES["groups"], terms=term, group="sequence"))
        model = reference(spec, seed=1, dtype=torch.float64)
        tokens = torch.arange(26).view(2, 13)
        values.append(float(model(tokens).aux_loss.detach()))
    assert abs(values[0] - values[1]) > 1e-4
    assert values[0] == values[2]


class BalancedByDevices(OptionedMoe):
    """DeepSeekMoE, equations 12 to 17, over each sequence or over the batch."""

    devices = 3

    def balance(self, logits: Tensor, chosen: Tensor) -> Tensor:
        s = logits.sigmoid() if self.topk.score == "sigmoid" else logits.softmax(-1)
        s = s / s.sum(-1, keepdim=True)
        groups = (
            [(s.flatten(0, 1), chosen.flatten(0, 1))] if self.group == "batch" else list(zip(s, chosen, strict=True))
        )
        total, size = torch.zeros((), dtype=torch.float64), EXPERTS // self.devices
        for scores, experts in groups:
            tokens, k = experts.shape
            f = [(experts == i).sum().double() * EXPERTS / (k * tokens) for i in range(EXPERTS)]
            p = scores.mean(0)
            for device in range(self.devices):
                members = range(device * size, (device + 1) * size)
                mean = sum(f[i] for i in members) / size
                total = total + ALPHA * mean * sum(p[i] for i in members)
        return total / len(groups)


@pytest.mark.parametrize("group", ["sequence", "batch"])
@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "groups", "switch"])
def test_device_loss_is_deepseek_moes(gate: str, group: str) -> None:
    text = LAYERS.format(gate=GATES[gate], terms=f"device_loss({ALPHA}, groups = 3)", group=group)
    require_equal(*pair(small_spec(text), BalancedByDevices))

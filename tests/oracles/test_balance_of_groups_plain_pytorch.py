"""`sequence_loss` and `device_loss` against their papers' equations, in a handwritten model."""

from __future__ import annotations

import pytest
import torch
from oracles.optioned_moe import OptionedMoe, pair, require_equal
from oracles.specs import small_spec
from torch import Tensor

from moec.runtime.job.reference import reference

ORACLE_OF = {
    "sequence_loss": "",
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


def test_sequence_loss_counts_the_scores_and_not_the_choices() -> None:
    """The switch loss counts the choices, which biases and groups change."""
    values = []
    for term in ("sequence_loss(1)", "switch_loss(1)"):
        spec = small_spec(LAYERS.format(gate=GATES["groups"], terms=term, group="sequence"))
        model = reference(spec, seed=1, dtype=torch.float64)
        tokens = torch.arange(26).view(2, 13)
        values.append(float(model(tokens).aux_loss.detach()))
    assert abs(values[0] - values[1]) > 1e-4


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

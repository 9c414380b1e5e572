"""`bias = online(rate)` against a handwritten model: biases choose experts, do not weigh them, and follow the loads."""

from __future__ import annotations

import pytest
import torch
from oracles.same import pair, require_plain_gradients
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainMoe, kept_choices
from support.combinations import diagonals
from torch import Tensor

ORACLE_OF = {
    "topk": "bias",
    "online": "rate",
}

RATE, STEPS = 0.03, 4
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{
        experts = 5 * swiglu(20)
        gate    = topk({k}, score = {score}, order = {order}, normalize = {normalize}, bias = online({rate}))
        balance = {balance}; {beside}
      }}
    }}
"""
BESIDE = {
    "dropless": "",
    "dynamic-max": "capacity = dynamic(max = 0.75); group = batch",
    "factor": "capacity = factor(0.75)",
    "shared": "shared = swiglu(12)",
}
GATES = [
    ("sigmoid", "before", "true", 2),
    ("sigmoid", "before", "false", 1),
    ("softmax", "before", "false", 3),
    ("softmax", "before", "true", 2),
    ("softmax", "after", "false", 2),
    ("sigmoid", "after", "true", 2),
]


class BiasedMoe(PlainMoe):
    """`PlainMoe` with a bias per expert, which is no parameter, and `counted`, the rows of each expert in a step."""

    bias: Tensor
    counted: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        logits = x @ self.gate.weight.T
        score = logits.sigmoid() if self.topk.score == "sigmoid" else logits.softmax(-1)
        chosen = (score + self.bias).topk(self.topk.k).indices
        if self.topk.order == "after" and self.topk.score == "softmax":
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = score.gather(-1, chosen)
        if self.topk.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        kept = torch.ones_like(chosen)
        factor, least = self.places()
        if factor is not None:
            kept = kept_choices(chosen, factor, least, len(chosen) if self.group == "sequence" else 1, 5)
        if self.training:
            self.counted += torch.bincount(chosen[kept == 1].flatten(), minlength=5)
        mixed = self.mix(x.flatten(0, 1), weights * kept, chosen).view_as(x)
        return self.with_dense_paths(x, mixed), self.balance(logits, chosen)

    def end_of_step(self) -> None:
        """Wang et al. 2024, algorithm 1: an expert with fewer rows than the mean is chosen more readily."""
        error = self.counted.double().mean() - self.counted.double()
        self.bias += RATE * error.sign()
        self.counted.zero_()


@pytest.mark.parametrize(("gate_of", "beside"), diagonals(GATES, list(BESIDE), number=2))
def test_the_reference_trains_as_the_handwritten_model(gate_of: tuple[str, str, str, int], beside: str):
    score, order, normalize, k = gate_of
    gate = {"score": score, "order": order, "normalize": normalize, "k": k, "rate": RATE}
    balance = "[switch_loss(0.01), z_loss(1e-3)]" if k > 1 else "[z_loss(1e-2)]"
    ours, plain, draw = pair(small_spec(LAYERS.format(beside=BESIDE[beside], balance=balance, **gate)))
    mixtures = [module for module in plain.modules() if isinstance(module, PlainMoe)]
    for mixture in mixtures:
        mixture.__class__ = BiasedMoe
        mixture.bias, mixture.counted = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    tight = {"rtol": 1e-8, "atol": 1e-9}
    moved = torch.zeros(5, dtype=torch.float64)
    for _ in range(STEPS):
        for _ in range(2):  # micro-batches
            tokens, labels = (torch.randint(VOCAB, (2, 11), generator=draw) for _ in range(2))
            output, (logits, loss) = ours(tokens, labels), plain(tokens, labels)
            torch.testing.assert_close(output.logits, logits, **tight)
            torch.testing.assert_close(output.loss, loss, **tight)
            output.loss.backward()
            loss.backward()
        ours.update_states()
        for number, mixture in enumerate(mixtures):
            mixture.end_of_step()
            torch.testing.assert_close(ours.get_buffer(f"layers.{number}.moe.gate.bias"), mixture.bias, **tight)
            moved += mixture.bias.abs()
        require_plain_gradients(ours, plain, tight)
        with torch.no_grad():
            for model in (ours, plain):
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad if parameter.grad is not None else 0.0
                    parameter.grad = None
    assert moved.max() > 3 * RATE

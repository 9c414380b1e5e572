"""The gate `sparsemixer` against an estimator written by hand, and against the function of Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.gate_oracle import OracleMoe, Routed, compare
from oracles.plain_philox import uniform
from torch import Tensor

ORACLE_OF = {
    "sparsemixer": "k jitter",
}

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 6 * swiglu(20); gate = sparsemixer({k}, jitter = {jitter}); balance = [{balance}]; {beside} }}
    }}
"""


class Estimator(torch.autograd.Function):
    """δ · p forward; backward, for logits z of candidates with probabilities π: p · (1[i chosen] − πᵢ)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, gates: Tensor, chosen: int, scale: float) -> Tensor:
        ctx.save_for_backward(gates)
        ctx.chosen = chosen
        return gates[chosen] * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gates,) = ctx.saved_tensors
        found = -gates * gates[ctx.chosen]
        found[ctx.chosen] += gates[ctx.chosen]
        return grad * found, None, None, None


def of_token(logits: Tensor, numbers: Tensor, k: int, jitter: float, training: bool) -> tuple[Tensor, list[int], int]:
    """Weights and experts of one token, and how many choices were not full."""
    left, weights, chosen, partial = list(range(len(logits))), [], [], 0
    for number in range(k):
        values = logits.tolist()
        best = max(values[i] for i in left)
        near = [i for i in left if (best - values[i]) / max(abs(values[i]), best) <= 2 * jitter]
        gates = torch.zeros_like(logits)
        gates[near] = logits[near].detach().softmax(0)
        pick = next(i for i in left if values[i] == best)
        scale = 1.0
        if training:
            total, wanted = 0.0, float(numbers[number]) * sum(gates.tolist())
            for pick in near:
                total += float(gates[pick])
                if total > wanted:
                    break
            if values[pick] != best and numbers[k + number] <= 0.75:
                scale, partial = 1 / 3, partial + 1
        weights.append(Estimator.apply(logits, gates, pick, scale))
        chosen.append(pick)
        left.remove(pick)
    return torch.stack(weights), chosen, partial


def mixer(k: int, jitter: float) -> type[OracleMoe]:
    class SparseMoe(OracleMoe):
        partial = 0

        def route(self, x: Tensor) -> Routed:
            logits = self.logits(x)
            numbers = uniform(*x.shape[:2], 2 * k, self.number).flatten(0, 1)
            each = [
                of_token(row, own, k, jitter, self.training)
                for row, own in zip(logits.flatten(0, 1), numbers, strict=True)
            ]
            self.partial = sum(partial for *_, partial in each)
            weights = torch.stack([w for w, *_ in each]).unflatten(0, x.shape[:2])
            experts = torch.tensor([e for _, e, _ in each]).unflatten(0, x.shape[:2])
            return Routed(weights, experts, logits, logits.softmax(-1))

    return SparseMoe


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("k", "jitter"), [(1, 0.5), (2, 0.01), (2, 0.4), (3, 1.0), (6, 0.3), (2, 0.6), (3, 0.8)])
def test_reference_equals_the_estimator(k: int, jitter: float, training: bool) -> None:
    layers = LAYERS.format(k=k, jitter=jitter, balance="switch_loss(0.3), z_loss(0.1)", beside="")
    plain = compare(mixer(k, jitter), layers, training=training)
    partial = [layer.moe.partial for layer in plain.layers]
    assert all(partial) == (training and jitter > 0.1)


@pytest.mark.parametrize("beside", ["capacity = factor(0.75)", "group = batch; capacity = factor(1.0)"])
def test_capacity_and_padding(beside: str) -> None:
    layers = LAYERS.format(k=2, jitter=0.4, balance="importance_loss(0.3)", beside=beside)
    compare(mixer(2, 0.4), layers, padding=3)


# ---- Hugging Face --------------------------------------------------------------------------------------


class Chosen:
    """`exponential_` whose logarithm makes one expert the largest, for each round in turn."""

    def __init__(self, experts: Tensor) -> None:
        self.rounds = list(experts.unbind(-1))

    def __call__(self, tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor).scatter_(-1, self.rounds.pop(0)[:, None], 1e-300)


@pytest.mark.parametrize("training", [True, False])
def test_weights_and_gradients_equal_those_of_phi(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3.5-MoE rounds 1/3 to 0.3333. Its random numbers are replaced by ours."""
    phi = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    if not hasattr(phi, "sparsemixer"):
        pytest.skip("this transformers has no function sparsemixer")
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 6, dtype=torch.float64, generator=generator).requires_grad_()
    numbers = torch.rand(64, 4, generator=generator).double()
    each = [of_token(row, own, 2, 0.3, training) for row, own in zip(logits, numbers, strict=True)]
    weights, chosen = torch.stack([w for w, *_ in each]), torch.tensor([e for _, e, _ in each])
    assert any(partial for *_, partial in each) == training
    draw, marks = Chosen(chosen), iter(numbers[:, 2:].unbind(1))
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda tensor: draw(tensor))
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor: tensor)
    monkeypatch.setattr(torch, "rand_like", lambda like: next(marks)[:, None])
    theirs, experts = phi.sparsemixer(logits, 0.3, training)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(theirs, weights, rtol=2e-4, atol=1e-12)
    cotangent = torch.randn(64, 2, dtype=torch.float64, generator=generator)
    expected, found = (torch.autograd.grad(w, logits, cotangent)[0] for w in (theirs, weights))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)

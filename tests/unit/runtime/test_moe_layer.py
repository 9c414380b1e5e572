"""A layer composed of the operators, as in a compiled graph."""

from __future__ import annotations

import copy

import pytest
import torch
from support.combinations import diagonals
from torch import Tensor, nn

from moec.runtime import ops


class MoeLayer(nn.Module):
    def __init__(self, activation: str, score: str) -> None:
        super().__init__()
        factor = {"swiglu": 2, "gelu": 1}[activation]
        self.gate = nn.Parameter(torch.randn(5, 8))
        self.up = nn.Parameter(torch.randn(5, factor, 6, 8))
        self.down = nn.Parameter(torch.randn(5, 8, 6))
        self.activation, self.score = activation, score

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.rope(x[:, :, None], None, 1e4)[:, :, 0]
        probabilities, weights, experts = ops.route(
            (x @ self.gate.to(x.dtype).t()).float(), None, 2, self.score, "before", True
        )
        rows, counts, positions = ops.permute(x, experts, 5)
        out, *_ = ops.expert_mlp(rows, counts, self.up, self.down, None, None, None, self.activation)
        return ops.combine(out, positions, weights), ops.switch_loss(probabilities, ops.count_choices(experts, 5, 0))


def train(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out, balance = layer(x)
    (out.square().sum() + 0.1 * balance).backward()
    return [out, balance, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize(("activation", "score"), diagonals(["swiglu", "gelu"], ["softmax", "sigmoid"]))
def test_a_compiled_layer_in_one_graph_equals_eager_with_gradients(activation: str, score: str) -> None:
    layer, x = MoeLayer(activation, score), torch.randn(2, 7, 8)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    for ours, eager in zip(train(compiled, x), train(layer, x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_a_compiled_layer_takes_other_sequence_lengths_without_a_new_graph() -> None:
    layer = MoeLayer("swiglu", "softmax")
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager", dynamic=True)
    train(compiled, torch.randn(2, 7, 8))
    compiled.zero_grad()
    x = torch.randn(2, 11, 8)
    with torch.compiler.set_stance("fail_on_recompile"):
        results = train(compiled, x)
    for ours, eager in zip(results, train(layer, x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_a_layer_is_deterministic() -> None:
    layer, x = MoeLayer("swiglu", "softmax"), torch.randn(2, 64, 8)
    first = train(copy.deepcopy(layer), x)
    for again, before in zip(train(copy.deepcopy(layer), x), first, strict=True):
        assert torch.equal(again, before)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    layer, x = MoeLayer("gelu", "softmax").double(), torch.randn(2, 7, 8, dtype=torch.float64)
    layer.gate.data = layer.gate.data.float().double()
    whole, _ = layer(x)
    for sequence in range(2):
        torch.testing.assert_close(layer(x[sequence : sequence + 1])[0][0], whole[sequence])

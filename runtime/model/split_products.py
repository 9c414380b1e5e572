"""Dense products whose gradients of weights a `WeightQueue` may put off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from moec.runtime.refused_derivatives import once_differentiable
from moec.runtime.weight_queue import WeightQueue, current_queue, edges_of


def split_products(module: nn.Module) -> None:
    """Replaces the dense products of a layer's graphs by `linear`, whose gradient of weights a queue may put off."""
    for graph_module in module.modules():
        if isinstance(graph_module, fx.GraphModule):
            split_products_of(graph_module.graph)
            graph_module.recompile()


def split_products_of(graph: fx.Graph) -> None:
    """The same for the nodes of a graph."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            node.target = linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., I], weight [O, I], bias [O]."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    # A layer that backward computes again has no queue, and must save what its first pass saved.
    out: Tensor = _Linear.apply(current_queue(), x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queue: WeightQueue | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.queue, ctx.edges = queue, edges_of([weight]) if queue is not None else []
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable("a dense product of a pipeline stage")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows, flat_grad = x.flatten(0, -2), grad.flatten(0, -2)

        def compute() -> Sequence[Tensor]:
            return (flat_grad.t() @ rows,)

        grad_weight = None
        if needs_weight and ctx.queue is not None and ctx.queue.puts_off:
            ctx.queue.put(ctx.edges, compute)
        elif needs_weight:
            (grad_weight,) = compute()
        return None, grad @ weight if needs_x else None, grad_weight, flat_grad.sum(0) if needs_bias else None

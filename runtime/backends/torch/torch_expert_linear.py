"""One matrix for each expert in plain torch: a product per expert, into slices of preallocated results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_experts import project, sum_rows
from moec.runtime.backends.torch.torch_memory import new_empty
from moec.runtime.backends.torch.torch_row_groups import row_groups
from moec.runtime.backends.torch.torch_threads import each_expert


def expert_linear(rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, weight = rows.contiguous(), weight.contiguous()
    groups = row_groups(counts, rows.shape[0])
    out = new_empty(rows, (rows.shape[0], weight.shape[1]))

    def compute(expert: int) -> None:
        group = groups[expert]
        if group.size:
            expert_out = group.buffer_for(out)
            project(group.gather(rows), weight, bias, expert, expert_out)
            group.scatter(expert_out, out)

    _run([group.size for group in groups], weight, rows, compute)
    return out


def expert_linear_backward(
    grad: Tensor, rows: Tensor, counts: Tensor, weight: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad, rows, weight = grad.contiguous(), rows.contiguous(), weight.contiguous()
    groups = row_groups(counts, rows.shape[0])
    grad_rows, grad_weight = new_empty(rows, rows.shape), new_empty(weight, weight.shape)
    grad_bias = weight.new_zeros(weight.shape[:2] if has_bias else 0)

    def compute(expert: int) -> None:
        group = groups[expert]
        if not group.size:
            grad_weight[expert].zero_()
            return
        expert_grad, expert_grad_rows = group.gather(grad), group.buffer_for(grad_rows)
        torch.mm(expert_grad.t(), group.gather(rows), out=grad_weight[expert])
        if has_bias:
            sum_rows(expert_grad, grad_bias[expert])
        torch.mm(expert_grad, weight[expert], out=expert_grad_rows)
        group.scatter(expert_grad_rows, grad_rows)

    _run([group.size for group in groups], weight, rows, compute)
    return grad_rows, grad_weight, grad_bias


def _run(sizes: list[int], weight: Tensor, rows: Tensor, compute: Callable[[int], None]) -> None:
    each_expert(sizes, weight[0].numel() if len(weight) else 0, rows.device, lambda: compute)

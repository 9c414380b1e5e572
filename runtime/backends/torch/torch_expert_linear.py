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

    _run([group.size for group in groups], weight.shape, rows, compute)
    return out


def expert_linear_backward(
    grad: Tensor, rows: Tensor, counts: Tensor, weight: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_rows, gradients = expert_linear_backward_split(grad, rows, counts, weight, has_bias)
    return grad_rows, *gradients()


def expert_linear_backward_split(
    grad: Tensor, rows: Tensor, counts: Tensor, weight: Tensor, has_bias: bool
) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
    grad, rows, weight = grad.contiguous(), rows.contiguous(), weight.contiguous()
    groups, shape = row_groups(counts, rows.shape[0]), weight.shape
    sizes, grad_rows = [group.size for group in groups], new_empty(rows, rows.shape)

    def compute(expert: int) -> None:
        group = groups[expert]
        if group.size:
            expert_grad_rows = group.buffer_for(grad_rows)
            torch.mm(group.gather(grad), weight[expert], out=expert_grad_rows)
            group.scatter(expert_grad_rows, grad_rows)

    def gradients() -> tuple[Tensor, Tensor]:
        grad_weight, grad_bias = new_empty(rows, shape), rows.new_zeros(shape[:2] if has_bias else 0)

        def compute_weight(expert: int) -> None:
            group = groups[expert]
            if not group.size:
                grad_weight[expert].zero_()
                return
            expert_grad = group.gather(grad)
            torch.mm(expert_grad.t(), group.gather(rows), out=grad_weight[expert])
            if has_bias:
                sum_rows(expert_grad, grad_bias[expert])

        _run(sizes, shape, rows, compute_weight)
        return grad_weight, grad_bias

    _run(sizes, shape, rows, compute)
    return grad_rows, gradients


def _run(sizes: list[int], shape: torch.Size, rows: Tensor, compute: Callable[[int], None]) -> None:
    each_expert(sizes, shape[1] * shape[2] if shape[0] else 0, rows.device, lambda: compute)

"""Rows sorted by expert, and their weighted sums, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    choices = experts.reshape(-1)
    if choices.device.type == "cpu" and choices.numel():
        least, most = (int(bound) for bound in choices.aminmax())
        if least < 0 or most >= num_experts:
            message = f"moec::permute: experts must be from 0 to {num_experts - 1}, not {least} to {most}"
            raise RuntimeError(message)
    counts = torch.bincount(choices, minlength=num_experts)
    order = _stable_order(choices, num_experts)
    k = experts.shape[2]
    tokens = order if k == 1 else order.div(k, rounding_mode="floor")
    rows = x.reshape(-1, x.shape[-1]).index_select(0, tokens)
    return rows, counts[None], _inverse(order).view(experts.shape)


def permute_backward(grad: Tensor, positions: Tensor) -> Tensor:
    *tokens, k = positions.shape
    chosen = positions.reshape(-1, k)
    if k == 1:
        return grad.index_select(0, chosen[:, 0]).view(*tokens, grad.shape[1])
    dtype = torch.promote_types(grad.dtype, torch.float32)
    total = grad.index_select(0, chosen[:, 0]).to(dtype)
    for choice in range(1, k):
        total += grad.index_select(0, chosen[:, choice])
    return total.to(grad.dtype).view(*tokens, grad.shape[1])


def combine(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    if rows.shape[0] != positions.numel():
        message = f"moec::combine: {rows.shape[0]} rows for {positions.numel()} positions"
        raise RuntimeError(message)
    *tokens, k = positions.shape
    chosen, scale = positions.reshape(-1, k), weights.reshape(-1, k, 1)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros((chosen.shape[0], rows.shape[1]), dtype=dtype, device=rows.device)
    for choice in range(k):
        total.addcmul_(rows.index_select(0, chosen[:, choice]).to(dtype), scale[:, choice].to(dtype))
    return total.to(rows.dtype).view(*tokens, rows.shape[1])


def combine_backward(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    k = positions.shape[2]
    chosen, scale = positions.reshape(-1, k), weights.reshape(-1, k, 1)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    grad = grad.reshape(-1, rows.shape[1]).to(dtype)
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    by_choice = grad_weights.view(-1, k)
    for choice in range(k):
        where = chosen[:, choice]
        grad_rows.index_copy_(0, where, (grad * scale[:, choice].to(dtype)).to(rows.dtype))
        by_choice[:, choice] = (rows.index_select(0, where).to(dtype) * grad).sum(dim=-1)
    return grad_rows, grad_weights


def _stable_order(choices: Tensor, num_experts: int) -> Tensor:
    """The permutation that sorts [N] indices below `num_experts`, equal ones in their order.

    NumPy's stable sort of 16-bit integers is a radix sort, that is, counting: on CPU 3 to 14 times as fast as
    `torch.sort`, and faster yet than one-hot prefix sums (measured, 4,096 to 65,536 choices of 16 to 256).
    """
    if choices.device.type == "cpu" and num_experts <= 2**15:
        return torch.from_numpy(choices.to(torch.int16).numpy().argsort(kind="stable"))
    return choices.sort(stable=True)[1]


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))

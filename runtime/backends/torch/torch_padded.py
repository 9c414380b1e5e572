"""Queues of experts and padded rows, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_rows import token_sums


def count_queues(experts: Tensor, num_experts: int) -> Tensor:
    batch, _, k = experts.shape
    counts = experts.new_zeros((batch, k, num_experts))
    counts.scatter_add_(2, experts.clamp_min(0).transpose(1, 2), (experts >= 0).to(torch.int64).transpose(1, 2))
    return counts[:, None]


def queue_starts(counts: Tensor, groups: int) -> Tensor:
    batch, pieces, k, num_experts = counts.shape
    group_sequences = batch // groups if groups else 1
    # Within a group: first choices before second ones, then tokens in order.
    if counts.numel() == 0:
        return torch.zeros_like(counts)
    by_choice = counts.reshape(-1, group_sequences, pieces, k, num_experts).permute(0, 3, 1, 2, 4)
    queues = by_choice.reshape(by_choice.shape[0], k * group_sequences * pieces, num_experts)
    starts = (queues.cumsum(1) - queues).view(by_choice.shape)
    return starts.permute(0, 2, 3, 1, 4).reshape(counts.shape)


def places_of(batch: int, tokens: int, k: int, num_experts: int, *options: int) -> tuple[int, int]:
    """The capacity of an expert in one group, and the places that a rank has for its rows: from shapes alone.

    `options` are groups, spread (tokens of a whole group / this rank's tokens of it), numerator, denominator and
    minimum: capacity = max(minimum, ⌈numerator / denominator · k · tokens of the group / experts⌉).
    """
    groups, spread, numerator, denominator, minimum = options
    group_sequences = batch // groups if groups else 1
    capacity = max(minimum, -(-numerator * k * group_sequences * tokens * spread // (denominator * num_experts)))
    return capacity, (groups or batch) * min(capacity, group_sequences * tokens)


def permute_padded(x: Tensor, experts: Tensor, starts: Tensor, *how: int) -> tuple[Tensor, Tensor, Tensor]:
    capacity, places = places_of(*experts.shape, starts.shape[3], *how)
    return _placed(x, experts, _finds_place(experts, starts, capacity), starts.shape[3], places)


def keep_choices(experts: Tensor, starts: Tensor, *how: int) -> Tensor:
    capacity, _ = places_of(*experts.shape, starts.shape[3], *how)
    return experts.where(_finds_place(experts, starts, capacity), -1)


def _finds_place(experts: Tensor, starts: Tensor, capacity: int) -> Tensor:
    """Whether each choice's index in its group's queue is below the capacity, bool [B, S, k]; False for −1."""
    batch, tokens, k = experts.shape
    # Each choice's queue, by sequence, j and expert; choices of −1 go to one extra queue at the end.
    queue = experts + torch.arange(batch * k, device=experts.device).view(batch, 1, k) * starts.shape[3]
    queue = queue.where(experts >= 0, starts.numel())
    rank = rank_within(queue.transpose(1, 2).reshape(-1)).view(batch, k, tokens).transpose(1, 2)
    queue_index = torch.cat([starts.reshape(-1), starts.new_zeros(1)])[queue] + rank
    return (queue_index < capacity) & (experts >= 0)


def largest_load(experts: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(experts.reshape(-1) + 1, minlength=num_experts + 1)[1:].max()


def permute_dynamic(x: Tensor, experts: Tensor, places: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return _placed(x, experts, experts >= 0, num_experts, int(places))


def _placed(
    x: Tensor, experts: Tensor, is_kept: Tensor, num_experts: int, places: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The kept choices' rows in the places of their experts, in the order of their tokens."""
    k = experts.shape[2]
    bucket = experts.where(is_kept, num_experts).reshape(-1)
    place = rank_within(bucket)
    positions = torch.where(is_kept, experts * places + place.view(experts.shape), -1)
    rows = x.new_zeros((num_experts * places, x.shape[2]))
    chosen = is_kept.reshape(-1).nonzero()[:, 0]
    rows.index_copy_(0, positions.reshape(-1)[chosen], x.reshape(-1, x.shape[2])[chosen // k])
    counts = torch.bincount(bucket, minlength=num_experts + 1)[:num_experts]
    return rows.view(num_experts, places, x.shape[2]), counts[None], positions


def permute_padded_backward(grad: Tensor, positions: Tensor) -> Tensor:
    return token_sums(grad, positions, some_are_none=True)


def combine_padded(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    return token_sums(rows, positions, weights, some_are_none=True)


def combine_padded_backward(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    k = positions.shape[2]
    flat, width = rows.reshape(-1, rows.shape[2]), rows.shape[2]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    grad = grad.reshape(-1, width).to(dtype)
    chosen, scale = positions.reshape(-1, k), weights.reshape(-1, k, 1)
    grad_rows, grad_weights = torch.zeros_like(flat), torch.empty_like(weights)
    by_choice = grad_weights.view(-1, k)
    for choice in range(k):
        row = chosen[:, choice]
        kept_tokens = (row >= 0).nonzero()[:, 0]
        grad_rows.index_copy_(0, row[kept_tokens], (grad * scale[:, choice].to(dtype))[kept_tokens].to(rows.dtype))
        by_choice[:, choice] = (_rows_at(flat, row).to(dtype) * grad).sum(dim=-1)
    return grad_rows.view(rows.shape), grad_weights


def _rows_at(rows: Tensor, indices: Tensor) -> Tensor:
    """The rows at these indices; zeros for dropped choices, −1."""
    if not rows.shape[0]:
        return rows.new_zeros((indices.shape[0], rows.shape[1]))
    return rows.index_select(0, indices.clamp_min(0)).masked_fill(indices[:, None] < 0, 0)


def rank_within(keys: Tensor) -> Tensor:
    """For each key of [N], the number of equal keys before it."""
    if not keys.numel():
        return keys
    ordered, order = keys.sort(stable=True)
    index = torch.arange(keys.numel(), device=keys.device)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = torch.where(is_first, index, 0).cummax(0)[0]
    return torch.empty_like(keys).scatter_(0, order, index - first)

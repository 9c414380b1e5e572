"""Queues of whole routing groups in an order of priorities, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_padded import places_of, rank_within


def keep_first(experts: Tensor, priorities: Tensor, *how: int) -> Tensor:
    """`how` is the number of experts, then as in `places_of`."""
    if not experts.numel():
        return experts.clone()
    num_experts, *room = how
    groups, (batch, tokens, k) = room[0] or experts.shape[0], experts.shape
    capacity, _ = places_of(batch, tokens, k, num_experts, *room)
    order = token_order(priorities, groups)
    queue = _in_queue(experts, order, groups)
    buckets = queue + num_experts * torch.arange(groups, device=queue.device)[:, None]
    before = rank_within(buckets.where(queue >= 0, groups * num_experts).flatten()).view_as(queue)
    return _by_token(queue.where(before < capacity, -1), order).view_as(experts)


def token_order(priorities: Tensor, groups: int) -> Tensor:
    """The tokens of each group, the highest priority first and equal ones in order: [B, S] -> [G, T] int64."""
    return priorities.reshape(groups, -1).sort(dim=1, descending=True, stable=True)[1]


def _in_queue(experts: Tensor, order: Tensor, groups: int) -> Tensor:
    """The choices of each group in the order of its queues: [B, S, k] -> [G, k T]."""
    k = experts.shape[2]
    ordered = experts.reshape(groups, -1, k).gather(1, order[..., None].expand(-1, -1, k))
    return ordered.transpose(1, 2).flatten(1)


def _by_token(queue: Tensor, order: Tensor) -> Tensor:
    """The inverse of `_in_queue`: [G, k T] -> [G, T, k]."""
    ordered = queue.view(queue.shape[0], -1, order.shape[1]).transpose(1, 2)
    return ordered.new_empty(ordered.shape).scatter_(1, order[..., None].expand_as(ordered), ordered)

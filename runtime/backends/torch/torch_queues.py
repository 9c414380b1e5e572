"""Queues of whole routing groups in an order of priorities, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_padded import places_of, rank_within


def keep_first(experts: Tensor, priorities: Tensor, *how: int) -> Tensor:
    """`how` is the number of experts, and the options of `places_of`."""
    if not experts.numel():
        return experts.clone()
    num_experts, *capacity_options = how
    groups = capacity_options[0] or len(experts)
    capacity, _ = places_of(*experts.shape, num_experts, *capacity_options)
    order = token_order(priorities, groups)
    queue = _in_queue(experts, order, groups)
    buckets = queue + num_experts * torch.arange(groups, device=queue.device)[:, None]
    queue_index = rank_within(buckets.where(queue >= 0, groups * num_experts).flatten()).view_as(queue)
    return _by_token(queue.where(queue_index < capacity, -1), order).view_as(experts)


def keep_best(experts: Tensor, priorities: Tensor | None, *how: int) -> Tensor:
    """`how` is the number of experts, and the options of `places_of`."""
    if not experts.numel():
        return experts.clone()
    num_experts, *capacity_options = how
    groups = capacity_options[0] or len(experts)
    capacity, _ = places_of(*experts.shape, num_experts, *capacity_options)
    by_group = experts.reshape(groups, -1)
    buckets = by_group + num_experts * torch.arange(groups, device=experts.device)[:, None]
    buckets = buckets.where(by_group >= 0, groups * num_experts)
    if priorities is None:
        queue_index = rank_within(buckets.flatten()).view_as(by_group)
    else:
        order = token_order(priorities.detach(), groups)
        ranks = rank_within(buckets.gather(1, order).flatten()).view_as(order)
        queue_index = torch.empty_like(ranks).scatter_(1, order, ranks)
    return by_group.where(queue_index < capacity, -1).view_as(experts)


def reroute(
    logits: Tensor, experts: Tensor, priorities: Tensor | None, bias: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor]:
    """`how` is the score, and the options of `places_of`."""
    if not experts.numel():
        return experts.clone(), experts.clone()
    score, *capacity_options = how
    groups, (batch, tokens, k), num_experts = capacity_options[0] or experts.shape[0], experts.shape, logits.shape[2]
    capacity, _ = places_of(batch, tokens, k, num_experts, *capacity_options)
    flat = logits.new_zeros(batch, tokens) if priorities is None else priorities
    order = token_order(flat, groups)
    queue = _in_queue(experts, order, groups)
    group_index = torch.arange(groups, device=queue.device)[:, None]
    buckets = (queue + num_experts * group_index).where(queue >= 0, groups * num_experts).flatten()
    assigned = queue.flatten().where(rank_within(buckets) < capacity, -1)
    loads = torch.bincount(buckets[assigned >= 0], minlength=groups * num_experts).clamp_max(capacity)
    tokens_of_choices = (order + group_index * order.shape[1]).repeat(1, k).flatten()
    is_chosen = torch.zeros(batch * tokens, num_experts + 1, dtype=torch.bool, device=queue.device)
    is_chosen.scatter_(1, experts.reshape(-1, k).where(experts.reshape(-1, k) >= 0, num_experts), True)
    keys = _preferences(logits, bias, score).view(-1, num_experts)
    waiting = ((assigned < 0) & (queue.flatten() >= 0)).nonzero()[:, 0]
    free = capacity - loads.view(groups, num_experts)
    _grant_requests(waiting, assigned, tokens_of_choices, keys, is_chosen[:, :-1], free)
    scored = assigned.where(assigned >= 0, queue.flatten())
    rerouted, weighed = (_by_token(values.view_as(queue), order).view_as(experts) for values in (assigned, scored))
    return rerouted, weighed


def _preferences(logits: Tensor, bias: Tensor | None, score: str) -> Tensor:
    """The keys that rank experts; finite, so that a forbidden expert (−inf) is below every other."""
    keys = logits = logits.detach()
    if bias is not None:
        keys = (logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)) + bias
    return keys.clamp_min(torch.finfo(keys.dtype).min)


def _grant_requests(
    waiting: Tensor, assigned: Tensor, tokens: Tensor, keys: Tensor, is_chosen: Tensor, free: Tensor
) -> None:
    """Assigns the choices `waiting` to experts with free places, in rounds, one request a token.

    `tokens`: the token of each choice. Writes `assigned`, `is_chosen` and `free` [G, E]. Each round grants every
    request or fills an expert, so there are at most E + k rounds.
    """
    num_groups, num_experts = free.shape
    per_group = keys.shape[0] // num_groups
    while waiting.numel():
        requesting = tokens[waiting]
        places = torch.arange(len(waiting), device=waiting.device)
        earliest = places.new_full((keys.shape[0],), len(waiting)).scatter_reduce_(0, requesting, places, "amin")
        is_first = earliest[requesting] == places
        requests, requesting_tokens = waiting[is_first], requesting[is_first]
        groups = requesting_tokens // per_group
        is_available = (free[groups] > 0) & ~is_chosen[requesting_tokens]
        requested = keys[requesting_tokens].masked_fill(~is_available, -torch.inf).max(dim=1)[1]
        can_ask = is_available.any(dim=1)
        buckets = (groups * num_experts + requested).where(can_ask, num_groups * num_experts)
        granted = can_ask & (rank_within(buckets) < free.flatten()[buckets.clamp_max(free.numel() - 1)])
        assigned[requests[granted]] = requested[granted]
        is_chosen[requesting_tokens[granted], requested[granted]] = True
        free -= torch.bincount(buckets[granted], minlength=free.numel()).view_as(free)
        done = torch.zeros_like(is_first).masked_scatter_(is_first, granted | ~can_ask)
        waiting = waiting[~done]


def token_order(priorities: Tensor, groups: int) -> Tensor:
    """The tokens, or choices, of each group, the highest priority first and equal ones in order: [B, S] -> [G, T]."""
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

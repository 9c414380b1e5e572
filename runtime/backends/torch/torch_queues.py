"""Queues of whole routing groups in an order of priorities, in plain torch."""

from __future__ import annotations

from typing import Any

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


def keep_best(experts: Tensor, priorities: Tensor | None, *how: int) -> Tensor:
    """`how` is the number of experts, then as in `places_of`."""
    if not experts.numel():
        return experts.clone()
    num_experts, *room = how
    groups, (batch, tokens, k) = room[0] or experts.shape[0], experts.shape
    capacity, _ = places_of(batch, tokens, k, num_experts, *room)
    of_group = experts.reshape(groups, -1)
    buckets = of_group + num_experts * torch.arange(groups, device=experts.device)[:, None]
    buckets = buckets.where(of_group >= 0, groups * num_experts)
    if priorities is None:
        before = rank_within(buckets.flatten()).view_as(of_group)
    else:
        order = token_order(priorities.detach(), groups)
        ranks = rank_within(buckets.gather(1, order).flatten()).view_as(order)
        before = torch.empty_like(ranks).scatter_(1, order, ranks)
    return of_group.where(before < capacity, -1).view_as(experts)


def reroute(
    logits: Tensor, experts: Tensor, priorities: Tensor | None, bias: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor]:
    """`how` is the score, then as in `places_of`."""
    if not experts.numel():
        return experts.clone(), experts.clone()
    score, *room = how
    groups, (batch, tokens, k), num_experts = room[0] or experts.shape[0], experts.shape, logits.shape[2]
    capacity, _ = places_of(batch, tokens, k, num_experts, *room)
    flat = logits.new_zeros(batch, tokens) if priorities is None else priorities
    order = token_order(flat, groups)
    queue = _in_queue(experts, order, groups)
    first = torch.arange(groups, device=queue.device)[:, None]
    buckets = (queue + num_experts * first).where(queue >= 0, groups * num_experts).flatten()
    found = queue.flatten().where(rank_within(buckets) < capacity, -1)
    taken = torch.bincount(buckets[found >= 0], minlength=groups * num_experts).clamp_max(capacity)
    owners = (order + first * order.shape[1]).repeat(1, k).flatten()
    chosen = torch.zeros(batch * tokens, num_experts + 1, dtype=torch.bool, device=queue.device)
    chosen.scatter_(1, experts.reshape(-1, k).where(experts.reshape(-1, k) >= 0, num_experts), True)
    keys = _preferences(logits, bias, score).view(-1, num_experts)
    waiting = ((found < 0) & (queue.flatten() >= 0)).nonzero()[:, 0]
    _ask(waiting, found, owners, keys, chosen[:, :-1], capacity - taken.view(groups, num_experts))
    scored = found.where(found >= 0, queue.flatten())
    kept, weighed = (_by_token(each.view_as(queue), order).view_as(experts) for each in (found, scored))
    return kept, weighed


def _preferences(logits: Tensor, bias: Tensor | None, score: str) -> Tensor:
    """What experts are ranked by; finite, so that a forbidden expert (−inf) is below every other."""
    keys = logits = logits.detach()
    if bias is not None:
        keys = (logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)) + bias
    return keys.clamp_min(torch.finfo(keys.dtype).min)


def _ask(waiting: Tensor, found: Tensor, owners: Tensor, keys: Tensor, chosen: Tensor, room: Tensor) -> None:
    """Rounds in which the choices `waiting`, in the order of the queue, ask for room; writes `found`.

    Each round grants every request or fills an expert, so there are at most E + k rounds. Writes `chosen` and `room`.
    """
    num_groups, num_experts = room.shape
    per_group = keys.shape[0] // num_groups
    while waiting.numel():
        tokens = owners[waiting]
        places = torch.arange(len(waiting), device=waiting.device)
        earliest = places.new_full((keys.shape[0],), len(waiting)).scatter_reduce_(0, tokens, places, "amin")
        asking = earliest[tokens] == places
        asks, by = waiting[asking], tokens[asking]
        groups = by // per_group
        open_ = (room[groups] > 0) & ~chosen[by]
        wanted = keys[by].masked_fill(~open_, -torch.inf).max(dim=1)[1]
        possible = open_.any(dim=1)
        buckets = (groups * num_experts + wanted).where(possible, num_groups * num_experts)
        granted = possible & (rank_within(buckets) < room.flatten()[buckets.clamp_max(room.numel() - 1)])
        found[asks[granted]] = wanted[granted]
        chosen[by[granted], wanted[granted]] = True
        room -= torch.bincount(buckets[granted], minlength=room.numel()).view_as(room)
        done = torch.zeros_like(asking).masked_scatter_(asking, granted | ~possible)
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

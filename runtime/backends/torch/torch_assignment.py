"""Balanced assignment in plain torch, on the host: the matching of tokens and experts with the largest sum of scores.

A flow of least cost by successive shortest paths (Ahuja, Magnanti and Orlin 1993, section 9.7) on a graph whose nodes
are the experts: an edge from one expert to another costs what the cheapest move of a token loses.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

ROUNDS = 40
"""Rounds of dual ascent before the exact part, which then has few tokens left to move."""

ROUNDING = 1e-13
"""Differences below this part of the largest score are rounding."""


def balanced_assignment(scores: Tensor, training: Tensor, real: Tensor | None, groups: int) -> Tensor:
    batch, tokens, num_experts = scores.shape
    if not int(training) or not scores.numel():
        return scores.max(dim=2, keepdim=True)[1] if scores.numel() else scores.new_zeros((batch, tokens, 1)).long()
    on_host = scores.detach().double().cpu()
    # A token without finite scores, which a model reports elsewhere, gets equal scores.
    on_host = on_host.where(on_host.isfinite().all(dim=2, keepdim=True), 0.0)
    by_group = on_host.reshape(groups or batch, -1, num_experts)
    assigned = torch.full(by_group.shape[:2], -1)
    is_real = torch.ones_like(assigned) if real is None else real.cpu().view_as(assigned)
    for assignment, group_scores, group_real in zip(assigned, by_group, is_real != 0, strict=True):
        assignment[group_real] = match(group_scores[group_real])
    return assigned.view(batch, tokens, 1).to(scores.device)


def match(scores: Tensor) -> Tensor:
    """The expert of each token, for the largest sum of scores: float64 [T, E] -> int64 [T].

    Every expert gets ⌊T/E⌋ or ⌈T/E⌉ tokens. Exact up to the rounding of sums; at most T paths, which is the bound of
    the loop.
    """
    tokens, num_experts = scores.shape
    floor, extra = divmod(tokens, num_experts)
    scores = scores - scores.mean(dim=1, keepdim=True)
    smallest = ROUNDING * float(scores.abs().max()) if tokens else 0.0
    prices = _prices(scores)
    experts = (scores - prices).max(dim=1)[1]
    # Experts with a token more than ⌊T/E⌋: first those in most demand, which leaves no improving cycle.
    has_extra = torch.zeros(num_experts, dtype=torch.int64)
    has_extra[prices.sort(descending=True, stable=True)[1][:extra]] = 1
    costs = torch.full((num_experts + 1, num_experts + 1), torch.inf, dtype=torch.float64)
    movers = torch.zeros((num_experts, num_experts), dtype=torch.int64)
    _update(range(num_experts), scores, experts, has_extra, costs, movers)
    for _ in range(tokens):
        load = torch.bincount(experts, minlength=num_experts) - has_extra - floor
        if not load.any():
            break
        path = _shortest_path(costs, load, smallest)
        for start, end in pairwise(path):
            if num_experts in (start, end):
                has_extra[min(start, end)] = int(end == num_experts)
            else:
                experts[movers[start, end]] = end
        _update([node for node in path if node < num_experts], scores, experts, has_extra, costs, movers)
    return experts


def _prices(scores: Tensor) -> Tensor:
    """Prices at which the tokens' best experts, by score − price, have about equal loads [E]: dual ascent."""
    tokens, num_experts = scores.shape
    prices, mean_load = scores.new_zeros(num_experts), tokens / num_experts
    best, least_excess = prices, float("inf")
    step = float((scores - scores.mean(dim=1, keepdim=True)).std(correction=0)) if tokens else 0.0
    for number in range(ROUNDS):
        load = torch.bincount((scores - prices).max(dim=1)[1], minlength=num_experts)
        excess = float((load - mean_load).abs().sum())
        if excess < least_excess:
            best, least_excess = prices, excess
        if excess < num_experts:
            break
        prices = prices + step * 0.93**number * (load / max(mean_load, 1.0) - 1).clamp_max(1.0)
    return best


def _update(
    nodes: range | list[int], scores: Tensor, experts: Tensor, has_extra: Tensor, costs: Tensor, movers: Tensor
) -> None:
    """Writes the cheapest move from each of these experts to every other, and its token.

    The last node has the extra places: a move to or from it changes which experts have more than ⌊T/E⌋ tokens.
    """
    num_experts = scores.shape[1]
    for node in nodes:
        tokens = (experts == node).nonzero()[:, 0]
        costs[node, :num_experts] = torch.inf
        if tokens.numel():
            losses = scores[tokens, node, None] - scores[tokens]
            costs[node, :num_experts], index = losses.min(dim=0)
            movers[node] = tokens[index]
        costs[node, node] = torch.inf
        costs[node, num_experts] = torch.inf if has_extra[node] else 0.0
        costs[num_experts, node] = 0.0 if has_extra[node] else torch.inf


def _shortest_path(costs: Tensor, load: Tensor, smallest: float) -> list[int]:
    """The cheapest path from an expert with too many tokens to one with too few (Bellman and Ford).

    Gains of at most `smallest` are ignored. Where rounding makes a cycle cheap, the path is one move.
    """
    nodes = costs.shape[0]
    distances = torch.full((nodes,), torch.inf, dtype=torch.float64)
    distances[:-1][load > 0] = 0.0
    predecessor = torch.full((nodes,), -1)
    for _ in range(nodes):
        through, last = (distances[:, None] + costs).min(dim=0)
        shorter = through < distances - smallest
        if not shorter.any():
            break
        distances = distances.where(~shorter, through)
        predecessor = predecessor.where(~shorter, last)
    ends = distances[:-1].masked_fill(load >= 0, torch.inf)
    path = [int(ends.argmin())]
    while (node := int(predecessor[path[0]])) >= 0:
        if node in path:
            return [int(load.argmax()), path[-1]]
        path.insert(0, node)
    return path

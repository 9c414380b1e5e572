"""What a router gives, in any system: combine weights, and the loss that it adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """`weights` [tokens, experts] multiply what experts give, 0 where a token goes to no expert or lost its place."""

    weights: Tensor
    loss: Tensor | None = None


def spread(weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Weights of choices [T, k] as a row of all experts: [T, experts]."""
    return torch.zeros(len(weights), experts, dtype=weights.dtype).scatter(-1, chosen, weights)


def mask_of(chosen: Tensor, experts: int) -> Tensor:
    """Which experts are chosen: bool [T, experts], of choices [T, k]."""
    return torch.zeros(len(chosen), experts, dtype=torch.bool).scatter(-1, chosen, True)


def in_best_groups(scores: Tensor, groups: int, kept: int, of: int) -> Tensor:
    """Scores [T, E], −∞ outside of the `kept` groups whose `of` best experts have the largest sum."""
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(of, -1).values.sum(-1).topk(kept, -1).indices
    return grouped.masked_fill(~mask_of(best, groups)[..., None], -torch.inf).flatten(-2)


def queue_places(chosen: Tensor, experts: int) -> Tensor:
    """The place of each choice [T, k] in its expert's queue, from 0: all first choices, then all second ones, …"""
    taken, places = torch.zeros(experts, dtype=torch.int64), []
    for j in range(chosen.shape[1]):
        ones = mask_of(chosen[:, j : j + 1], experts).long()
        places.append((taken + ones.cumsum(0) - 1).gather(-1, chosen[:, j : j + 1]))
        taken = taken + ones.sum(0)
    return torch.cat(places, -1)


def squared_variation(loads: Tensor) -> Tensor:
    """(standard deviation / mean)² with Bessel's correction, as `Tensor.var()` has it: Tutel and FastMoE."""
    return loads.var() / (loads.mean() ** 2 + 1e-10)

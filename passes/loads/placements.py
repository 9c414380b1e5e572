"""Placements of experts on ranks, and the rows that each rank has with them.

Arrays: `loads` [cases, experts] are choices of each expert. A case is a layer in an iteration.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Loads = Any
Homes = Any
"""The rank of each expert [cases, experts]."""

Copies = Any
"""Whether a rank has a copy of an expert [cases, experts, ranks]."""

STEPS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Ranks from layer to layer, of which the first is taken that leads to every rank: the next one alone, 1, would put the
second largest expert of a layer where the largest of the next one is."""

ROUNDS = 8
"""How often rows are split again. On the trace of SmartMoE's artifact, more change the third digit."""


def contiguous(cases: int, experts: int, ranks: int) -> Homes:
    """Equally many experts on each rank, in order."""
    return np.broadcast_to(np.arange(experts) * ranks // experts, (cases, experts))


def greedy(loads: Loads, ranks: int) -> Homes:
    """Equally many experts on each rank: the largest first, each on the rank with the fewest rows (SmartMoE, algorithm
    1)."""
    experts = loads.shape[1]
    homes, _ = _packed(np.argsort(-loads, 1, kind="stable"), -np.sort(-loads, 1), ranks, -(-experts // ranks))
    return homes


def rotated(homes: Homes, layers: Any, ranks: int) -> Homes:
    """The same sets of experts, the first on another rank in each layer: else the largest experts of all layers are on
    one rank, which keeps their rows."""
    step = next(number for number in STEPS if math.gcd(number, ranks) == 1)
    return (homes + step * layers[:, None]) % ranks


def replicated(loads: Loads, ranks: int, extra: int) -> Copies:
    """So many `extra` copies, each of the expert with the most rows for each copy so far, then packed as by `greedy`
    (EPLB, DeepSeek-AI 2025). An expert has at most one copy on a rank; `extra` is at most experts · (ranks - 1)."""
    cases, experts = loads.shape
    every, number = np.arange(cases), np.ones((cases, experts), int)
    for _ in range(extra):
        of_copy = np.where(number < ranks, loads / number, -1.0)
        most = np.argmax(of_copy, 1)
        number[every, most] += of_copy[every, most] >= 0
    # An item is a copy: the expert of each in order of the rows for a copy, all copies of one beside each other.
    order = np.argsort(-loads / number, 1, kind="stable")
    ends = np.cumsum(np.take_along_axis(number, order, 1), 1)
    items = np.take_along_axis(order, (np.arange(experts + extra)[:, None] >= ends[:, None, :]).sum(2), 1)
    sizes = np.take_along_axis(loads / number, items, 1)
    _, copies = _packed(items, sizes, ranks, -(-(experts + extra) // ranks), distinct=experts)
    return copies


def _packed(items: Any, sizes: Any, ranks: int, slots: int, distinct: int = 0) -> tuple[Homes, Copies]:
    """Puts each item on the rank with the fewest rows that has a free slot. Of `distinct` experts a copy goes to a rank
    without one, unless all free ranks have one."""
    cases, experts = len(items), distinct or items.shape[1]
    every, homes = np.arange(cases), np.zeros((cases, experts), int)
    rows, used = np.zeros((cases, ranks)), np.zeros((cases, ranks), int)
    copies = np.zeros((cases, experts, ranks), bool) if distinct else None
    for item, size in zip(items.T, sizes.T, strict=True):
        rank = np.argmin(np.where(used < slots, rows, np.inf), 1)
        if copies is not None:
            has = copies[every, item]
            free = np.where((used < slots) & ~has, rows, np.inf)
            rank = np.where(np.isfinite(free).any(1), np.argmin(free, 1), rank)
            copies[every, item, rank] = True
        homes[every, item] = rank
        rows[every, rank] += size
        used[every, rank] += 1
    return homes, copies


def rows_of_homes(loads: Loads, homes: Homes, ranks: int) -> Any:
    """The rows of each rank [cases, ranks]."""
    cases = len(loads)
    places = (np.arange(cases)[:, None] * ranks + homes).reshape(-1)
    return np.bincount(places, loads.reshape(-1), cases * ranks).reshape(cases, ranks)


def rows_of_copies(loads: Loads, copies: Copies) -> Any:
    """The rows of each rank [cases, ranks] where experts' rows are split among their copies by the step's own counts,
    so that the busiest rank has few: round after round, each expert's rows fill the ranks with the fewest others."""
    split = copies * (loads / copies.sum(2))[:, :, None]
    rows, every = split.sum(1), np.arange(len(loads))
    order = np.argsort(-loads * (copies.sum(2) > 1), 1, kind="stable")
    replicated = int((copies.sum(2) > 1).sum(1).max(initial=0))
    for _ in range(ROUNDS):
        for expert in order[:, :replicated].T:
            has, size = copies[every, expert], loads[every, expert]
            others = rows - split[every, expert]
            filled = _fill(np.where(has, others, np.inf), size)
            rows, split[every, expert] = others + filled, filled
    return rows


def _fill(others: Any, size: Any) -> Any:
    """Splits `size` [cases] rows so that ranks with `others` [cases, ranks], infinite for those without a copy,
    have equally many as far as possible."""
    order = np.argsort(others, 1)
    ordered = np.take_along_axis(others, order, 1)
    with np.errstate(invalid="ignore"):
        levels = (np.cumsum(ordered, 1) + size[:, None]) / np.arange(1, others.shape[1] + 1)
    filled = np.maximum((levels > ordered).sum(1), 1) - 1  # levels of the infinite ones are no numbers
    level = levels[np.arange(len(others)), filled]
    return np.maximum(level[:, None] - others, 0.0)

"""Rows of each expert among its copies, in whole numbers: every rank computes the same from the step's own counts.

Arrays: `copies` [experts, ranks] says which rank has weights of which expert; rows are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Counts = Any
"""The rows of each expert [experts]."""

Copies = Any
"""Whether a rank has weights of an expert [experts, ranks]."""

Quotas = Any
"""The rows of each expert that each rank computes [experts, ranks]."""

PASSES = 4
"""How often each expert's rows are split, beside those of the others. On the trace of SmartMoE's artifact, with a guest
on each of 16 ranks, the busiest rank has 1.085, 1.046, 1.029 and 1.021 of the mean after 1, 2, 4 and 8 passes."""


def split(counts: Counts, copies: Copies, passes: int = PASSES) -> Quotas:
    """Quotas with which the busiest rank has few rows. Experts with one copy stay there; then, those with few copies
    first, each is spread so that its ranks have equally many rows, as far as that is possible.

    Lists of integers: most experts have few copies, for which operations of arrays take several times as long."""
    number = copies.sum(1)
    quotas = np.where(copies & (number == 1)[:, None], counts[:, None], 0)
    several = np.flatnonzero(number > 1)
    order = several[np.lexsort((several, -counts[several], number[several]))]
    at = [np.flatnonzero(copies[expert]).tolist() for expert in order]
    parts = [[0] * len(ranks) for ranks in at]
    totals, rows = counts[order].tolist(), quotas.sum(0).tolist()
    for _ in range(passes):
        for total, ranks, of_ranks in zip(totals, at, parts, strict=True):
            others = [rows[rank] - part for rank, part in zip(ranks, of_ranks, strict=True)]
            of_ranks[:] = spread(total, others)
            for rank, other, part in zip(ranks, others, of_ranks, strict=True):
                rows[rank] = other + part
    for expert, ranks, of_ranks in zip(order, at, parts, strict=True):
        quotas[expert, ranks] = of_ranks
    return quotas


def in_shares(counts: Counts, shares: Any) -> Quotas:
    """Quotas in the proportions of `shares` [experts, ranks], of which every expert with rows has some. What is left
    over of whole numbers goes to the largest remainders, of equal ones to the first rank."""
    totals = np.maximum(shares.sum(1), 1)[:, None]
    wanted = counts[:, None] * shares
    quotas, remainders = wanted // totals, wanted % totals
    left = counts - quotas.sum(1)
    places = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1, kind="stable")
    return quotas + (places < left[:, None])


def spread(rows: int, others: Sequence[int]) -> list[int]:
    """So many rows over ranks with `others` already: the least ones are filled to one level. What is left over of whole
    numbers goes to the least."""
    order = sorted(range(len(others)), key=others.__getitem__)
    total, filled = rows, 0
    for place in order:
        if others[place] * filled > total:
            break
        total, filled = total + others[place], filled + 1
    level, left = divmod(total, filled)
    found = [0] * len(others)
    for place in order[:filled]:
        found[place] = level - others[place]
    found[order[0]] += left
    return found


def kept_here(counts: Any, quotas: Quotas) -> Any:
    """The rows of each rank's own tokens that its own copies compute [experts, ranks]. `counts` [ranks, experts]: those
    of each rank. Own copies take own rows first, for these cross no wire."""
    return np.minimum(counts.T, quotas)

"""All candidates of a search by their estimated seconds, the first ones that fit in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.grammar.spec import Spec
from moec.passes.cost.rates import Rates
from moec.passes.lower.lower_model import lower
from moec.passes.search.estimates import Estimates, estimates
from moec.passes.search.fronts import rows_of
from moec.passes.search.kinds import words_of_pairs
from moec.passes.search.rules import with_first_values
from moec.passes.search.space import Sizes, Space
from moec.passes.search.tables import Table

KEPT = 64
"""The candidates that a ranking keeps of those that fit, and that nearly do."""

SMALLEST = 16
"""Those that it keeps with the least memory."""

NEAR = 1.3
"""Estimated memory over a device's, up to which a plan may fit: estimates of large models are up to 1.24 times the
exact peak (decision 52)."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate: its estimated seconds and bytes, and the values of the words of `parallel` (None: left out).

    Of one of `Ranking.mixed`: the seconds if only as many layers as have to recomputed so much.
    """

    seconds: float
    memory: float
    words: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates that may be chosen, from the fastest on.

    `first`: those that fit; `near`: those up to `NEAR` of the memory; `mixed`: those that fit and of which some layers
    could recompute less; `smallest`: those with the least memory. Numbers of all, and of those that fit.
    """

    first: tuple[Ranked, ...]
    near: tuple[Ranked, ...]
    mixed: tuple[Ranked, ...]
    smallest: tuple[Ranked, ...]
    candidates: int
    fitting: int


def rank(spec: Spec, rates: Rates) -> Ranking:
    """Every candidate of a file that has some."""
    space, lowered, capacity = Space(spec), lower(with_first_values(spec)), spec.cluster.device.memory
    lists: tuple[list[Ranked], ...] = ([], [], [])
    smallest, candidates, fitting = list[Ranked](), 0, 0
    table = Table.of(space, lowered, rows_of(space, lowered, rates))
    for each in estimates(table, rates):
        fits, may_fit = each.memory <= capacity, each.memory <= NEAR * capacity
        candidates, fitting = candidates + len(fits), fitting + int(fits.sum())
        chosen = (
            (fits, each.seconds),
            (may_fit & ~fits, each.seconds),
            (fits & (each.least < each.seconds), each.least),
        )
        for kept, (which, seconds) in zip(lists, chosen, strict=True):
            kept += [_ranked(each, number, seconds) for number in _least(np.where(which, seconds, np.inf), KEPT)]
        smallest += [_ranked(each, number, each.seconds) for number in _least(each.memory, SMALLEST)]
    first, near, mixed = (tuple(sorted(kept, key=_order)[:KEPT]) for kept in lists)
    smallest.sort(key=lambda ranked: (ranked.memory, *_order(ranked)))
    return Ranking(first, near, mixed, tuple(smallest[:SMALLEST]), candidates, fitting)


def _least(values: Any, number: int) -> Any:
    """The numbers of so many of the least finite values."""
    last = min(number, len(values)) - 1
    found = np.flatnonzero((values <= np.partition(values, last)[last]) & np.isfinite(values))
    return found[np.argsort(values[found], kind="stable")][:number]


def _order(ranked: Ranked) -> tuple[float, float, str]:
    return ranked.seconds, ranked.memory, str(ranked.words)


def _ranked(of: Estimates, number: int, seconds: Any) -> Ranked:
    return Ranked(float(seconds[number]), float(of.memory[number]), words_of(of, number))


def words_of(of: Estimates, number: int) -> dict[str, Any]:
    """The words of `parallel` of a candidate."""
    space, sizes = of.table.space, Sizes.of(map(int, of.table.rows[of.rows[number]]))
    schedule, virtual = of.schedules[of.taken[number]]
    return {
        "pp": sizes.pp,
        "dp": space.spec.cluster.ranks // (sizes.pp * sizes.cp * sizes.tp),
        "cp": sizes.cp,
        "tp": sizes.tp,
        **words_of_pairs(space.spec, space.kinds, sizes.experts),
        "zero": of.zero,
        "recompute": of.recompute,
        "microbatches": sizes.microbatches,
        "schedule": schedule if sizes.pp > 1 else None,
        "virtual": virtual if virtual > 1 else None,
    }

"""All candidates of a search by their estimated seconds, the first ones that fit in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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

OF_SCHEDULE = 8
"""Those that it keeps of each schedule, of which some layers may recompute less."""

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
    first, near, mixed, smallest = (list[Ranked]() for _ in range(4))
    candidates = fitting = 0
    table = Table.of(space, lowered, rows_of(space, lowered, rates))
    for each in estimates(table, rates):
        fits, may_fit = each.memory <= capacity, each.memory <= NEAR * capacity
        candidates, fitting = candidates + len(fits), fitting + int(fits.sum())
        for kept, which in zip((first, near), (fits, may_fit & ~fits), strict=True):
            kept += _first(each, which, each.seconds, KEPT)
        mixed += _mixed(each, fits & (each.least < each.seconds))
        smallest += [_ranked(each, number, each.seconds) for number in _least(each.memory, SMALLEST)]
    for kept in (first, near, mixed):
        kept.sort(key=_order)
    smallest.sort(key=lambda ranked: (ranked.memory, *_order(ranked)))
    few = _few_of_each_schedule(mixed)
    return Ranking(tuple(first[:KEPT]), tuple(near[:KEPT]), few, tuple(smallest[:SMALLEST]), candidates, fitting)


def _first(of: Estimates, which: Any, seconds: Any, number: int) -> list[Ranked]:
    """So many of the candidates that count, those with the least seconds."""
    return [_ranked(of, each, seconds) for each in _least(np.where(which, seconds, np.inf), number)]


def _mixed(of: Estimates, which: Any) -> Iterator[Ranked]:
    """Those of each schedule: estimates of one may err more than those of another."""
    names, numbers = np.unique([each.schedule for each in of.schedules], return_inverse=True)
    schedules = numbers.astype(np.int8)[of.taken]
    for schedule in range(len(names)):
        yield from _first(of, which & (schedules == schedule), of.least, OF_SCHEDULE)


def _few_of_each_schedule(ranked: Sequence[Ranked]) -> tuple[Ranked, ...]:
    number = Counter[Any]()
    found = list[Ranked]()
    for each in ranked:
        number[each.words["schedule"]] += 1
        if number[each.words["schedule"]] <= OF_SCHEDULE:
            found.append(each)
    return tuple(found)


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

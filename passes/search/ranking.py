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
from moec.passes.search.rules import with_first_values
from moec.passes.search.space import Space
from moec.passes.search.tables import Table, structures

KEPT = 64
"""The candidates that a ranking keeps."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate: the values of the words of `parallel` (None: left out), its estimated seconds and bytes."""

    seconds: float
    memory: float
    words: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The first candidates that fit, from the fastest on; the one with the least memory; and numbers of candidates."""

    first: tuple[Ranked, ...]
    smallest: Ranked
    candidates: int
    fitting: int


def rank(spec: Spec, rates: Rates) -> Ranking:
    """Every candidate of a file that has some."""
    space, lowered = Space(spec), lower(with_first_values(spec))
    first, smallest, candidates, fitting = list[Ranked](), list[Ranked](), 0, 0
    for rows in structures(spec, lowered, np.array(list(space.sizes()))):
        for each in estimates(space, Table.of(spec, lowered, rows), rates):
            fits = each.memory <= spec.cluster.device.memory
            candidates, fitting = candidates + len(fits), fitting + int(fits.sum())
            seconds = np.where(fits, each.seconds, np.inf)
            first += [_ranked(spec, each, row) for row in _least(seconds)]
            smallest.append(_ranked(spec, each, int(np.argmin(each.memory))))
        first = sorted(first, key=_order)[:KEPT]
        smallest = [min(smallest, key=lambda ranked: ranked.memory)]
    return Ranking(tuple(first), smallest[0], candidates, fitting)


def _least(seconds: Any) -> Any:
    """The numbers of the `KEPT` least finite values, and of those as large as the last of them."""
    last = min(KEPT, len(seconds)) - 1
    return np.flatnonzero((seconds <= np.partition(seconds, last)[last]) & np.isfinite(seconds))


def _order(ranked: Ranked) -> tuple[float, float, str]:
    return ranked.seconds, ranked.memory, str(ranked.words)


def _ranked(spec: Spec, of: Estimates, number: int) -> Ranked:
    return Ranked(float(of.seconds[number]), float(of.memory[number]), words_of(spec, of, number))


def words_of(spec: Spec, of: Estimates, number: int) -> dict[str, Any]:
    """The words of `parallel` of a candidate."""
    pp, cp, tp, ep, etp, microbatches = map(int, of.table.sizes[of.rows[number]])
    schedule, virtual = of.pipelined[number]
    return {
        "pp": pp,
        "dp": spec.cluster.ranks // (pp * cp * tp),
        "cp": cp,
        "tp": tp,
        "ep": ep,
        "etp": etp,
        "zero": of.zero,
        "recompute": of.recompute,
        "microbatches": microbatches,
        "schedule": schedule if pp > 1 else None,
        "virtual": virtual if virtual > 1 else None,
    }

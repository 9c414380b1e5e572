"""The sizes that a search compares: all, or of many with several kinds of mixtures those that are likely the best.

Costs of kinds add up. Pairs with equal ep * etp sum gradients over the same ranks, so that of those whose parameters
ZeRO cuts alike one that is no better in any cost is left out. Of more than two kinds, sums of costs are compared too
before the last one is added.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moec.passes.cost.optimizers import kind_of
from moec.passes.cost.rates import Rates
from moec.passes.ir import Program
from moec.passes.search.blocks import runs_in
from moec.passes.search.held import alike_for_zero
from moec.passes.search.kinds import Pair
from moec.passes.search.space import Base, Space
from moec.passes.search.tables import Rows, Table, group_numbers

Bases = Sequence[tuple[Base, Sequence[Sequence[Pair]]]]


class Option(NamedTuple):
    """A pair of each of some kinds, and the sums of what their layers take: an array of quantities."""

    pairs: tuple[Pair, ...]
    taken: Any


MOST_ROWS = 100_000
"""The rows up to which all are compared."""


def rows_of(space: Space, lowered: Program, rates: Rates) -> Rows:
    """A row of `Sizes` for each plan of a file; above `MOST_ROWS` without those that hardly are the best."""
    bases: Bases = list(space.bases())
    if sum(math.prod(map(len, pairs)) for _, pairs in bases) <= MOST_ROWS:
        combined = ((base, itertools.product(*pairs)) for base, pairs in bases)
        return np.array([(*base, *itertools.chain(*each)) for base, of_base in combined for each in of_base])
    options = [[Option((), 0.0)] for _ in bases]
    several = [number for number in range(len(space.kinds)) if any(len(pairs[number]) > 1 for _, pairs in bases)]
    for number in range(len(space.kinds)):
        if len(several) > 1 and number in several:
            of_kind = _front(space, lowered, rates, bases, number)
        else:
            of_kind = [[Option((pair,), 0.0) for pair in pairs[number]] for _, pairs in bases]
        options = list(map(_combined, options, of_kind))
        if number in several[1:-1]:
            options = list(map(_best, options))
    rows = ((base, option.pairs) for (base, _), of in zip(bases, options, strict=True) for option in of)
    return np.array([(*base, *itertools.chain(*pairs)) for base, pairs in rows])


def _combined(options: Sequence[Option], of_kind: Sequence[Option]) -> list[Option]:
    return [Option(one.pairs + other.pairs, one.taken + other.taken) for one in options for other in of_kind]


def _best(options: Sequence[Option]) -> list[Option]:
    """The options without those that another one undercuts or equals in every quantity."""
    if len(options) < 2:
        return list(options)
    return [options[number] for number in _undominated(np.stack([option.taken for option in options]))]


def _front(space: Space, lowered: Program, rates: Rates, bases: Bases, kind: int) -> list[list[Option]]:
    """For each base the pairs of a kind of which none is better."""
    every = [(place, pair) for place, (_, pairs) in enumerate(bases) for pair in pairs[kind]]
    rows = np.array([_row(*bases[place], kind, pair) for place, pair in every])
    taken, cuts = _taken(Table.of(space, lowered, rows), kind, rates)
    by_matrix, alike = kind_of(space.spec.update.optimizer).whole_matrices, dict[tuple[Any, ...], list[Option]]()
    for (place, pair), of, cut in zip(every, taken, cuts.tolist(), strict=True):
        key = place, math.prod(pair), cut, pair if by_matrix else None  # an update of matrices depends on their shapes
        alike.setdefault(key, []).append(Option((pair,), of))
    fronts: list[list[Option]] = [[] for _ in bases]
    for (place, *_), options in alike.items():
        fronts[place] += _best(options)
    return fronts


def _row(base: Base, pairs: Sequence[Sequence[Pair]], kind: int, pair: Pair) -> tuple[int, ...]:
    """A plan with a pair of one kind, and the first one of each other."""
    experts = [pair if number == kind else each[0] for number, each in enumerate(pairs)]
    return (*base, *itertools.chain(*experts))


def _taken(table: Table, kind: int, rates: Rates) -> tuple[Any, Any]:
    """What the layers of a kind take in each plan, a column for each quantity of which less is better; and numbers,
    equal where ZeRO cuts the same of their parameters."""
    times = Counter(of.body for of in table.program.layers if of.number in table.space.kinds[kind].layers)
    columns, cuts = list[list[Any]](), list[Any]()
    for name, number in times.items():
        runs = runs_in(table, name, table.space.recomputed, rates, splits=True)
        elements, cut = np.zeros(len(table.rows)), np.zeros(len(table.rows), int)
        for part, cost in runs.costs:
            shapes = (cost.workload.shape(p) for p in cost.block.parameters)
            elements[part.plans] = np.broadcast_to(sum(map(math.prod, shapes)), len(elements))[part.plans]
            for plans in alike_for_zero(part, cost):
                cut[plans] = cut.max() + 1
        columns.append([number * column for column in (elements, *itertools.chain(*runs.of.values()))])
        cuts.append(cut)
    return np.sum(columns, 0).T, group_numbers(cuts)


def _undominated(taken: Any) -> list[int]:
    """The rows of which no other one takes no more of anything; of equal ones the first."""
    kept = list[int]()
    for row in np.lexsort(taken.T[::-1]).tolist():
        if not (taken[kept] <= taken[row]).all(1).any():
            kept.append(row)
    return sorted(kept)

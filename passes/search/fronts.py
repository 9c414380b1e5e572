"""The sizes that a search compares: with several kinds of mixtures only pairs of `ep` and `etp` that may be the best.

Kinds add up, and of two pairs with the same product, to whose ranks the same sums of gradients go, one is worse if it
takes no less in anything. So each kind by itself leaves a few pairs for each base, and these are combined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moec.passes.cost.rates import Rates
from moec.passes.ir import Program, local_shape
from moec.passes.search.blocks import runs_in
from moec.passes.search.kinds import Pair
from moec.passes.search.space import Base, Space
from moec.passes.search.tables import Rows, Table, blocks_of, structures

Bases = Sequence[tuple[Base, Sequence[Sequence[Pair]]]]


def rows_of(space: Space, lowered: Program, rates: Rates) -> Rows:
    """A row of `Sizes` for each plan of a file that may be the fastest of those that fit."""
    bases: Bases = list(space.bases())
    several = [number for number in range(len(space.kinds)) if any(len(pairs[number]) > 1 for _, pairs in bases)]
    if len(several) > 1:
        fronts = {number: _front(space, lowered, rates, bases, number) for number in several}
        bases = [
            (base, [fronts[number][place] if number in fronts else each for number, each in enumerate(pairs)])
            for place, (base, pairs) in enumerate(bases)
        ]
    combined = ((base, experts) for base, pairs in bases for experts in itertools.product(*pairs))
    return np.array([(*base, *itertools.chain(*experts)) for base, experts in combined])


def _front(space: Space, lowered: Program, rates: Rates, bases: Bases, kind: int) -> list[list[Pair]]:
    """For each base the pairs of a kind of which none is better."""
    every = [(place, pair) for place, (_, pairs) in enumerate(bases) for pair in pairs[kind]]
    rows = np.array([_row(*bases[place], kind, pair) for place, pair in every])
    taken: Any = None
    for numbers in structures(space, lowered, rows):
        of = _taken(Table.of(space, lowered, rows[numbers]), kind, rates)
        taken = np.zeros((len(rows), of.shape[1])) if taken is None else taken
        taken[numbers] = of
    alike = dict[tuple[int, int], list[int]]()
    for number, (place, pair) in enumerate(every):
        alike.setdefault((place, math.prod(pair)), []).append(number)
    fronts: list[list[Pair]] = [[] for _ in bases]
    for (place, _), numbers in alike.items():
        fronts[place] += [every[numbers[best]][1] for best in _undominated(taken[numbers])]
    return fronts


def _row(base: Base, pairs: Sequence[Sequence[Pair]], kind: int, pair: Pair) -> tuple[int, ...]:
    """A plan with a pair of one kind, and the first one of each other."""
    experts = [pair if number == kind else each[0] for number, each in enumerate(pairs)]
    return (*base, *itertools.chain(*experts))


def _taken(table: Table, kind: int, rates: Rates) -> Any:
    """What the layers of a kind take in each plan, a column for each quantity of which less is better."""
    columns = list[Any]()
    for block in blocks_of(table.program, table.space.kinds[kind].layers):
        meshes = table.program.meshes_of(block)
        elements = (math.prod(local_shape(p.shape, p.layout, meshes)) for p in block.parameters if p.layout is not None)
        columns.append(sum(elements))
        for run in runs_in(table, block, table.space.recomputed, rates, splits=True).of.values():
            columns += run
    return np.stack([np.broadcast_to(column, len(table.rows)) for column in columns], 1)


def _undominated(taken: Any) -> list[int]:
    """The rows of which no other one takes no more of anything; of equal ones the first."""
    kept = list[int]()
    for row in np.lexsort(taken.T[::-1]).tolist():
        if not any(np.all(taken[other] <= taken[row]) for other in kept):
            kept.append(row)
    return sorted(kept)

"""The schedules of the plans of a table, and what they leave to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.passes.degrees.schedules import Pipeline
from moec.passes.ir.order import SPLIT_BACKWARD
from moec.passes.search.space import Pipelined, Sizes, Space
from moec.passes.search.tables import numbered
from moec.passes.search.waiting import Waiting, worst_of

Array = Any

QUEUES = SPLIT_BACKWARD
"""The schedules that put products of weights off, and keep what these need."""

BUBBLES: Mapping[str, float] = {"zero_bubble": 1 / 3, "zero_bubble_v": 1 / 6, "dual_pipe_v": 1 / 6}
"""The bubble of a schedule over that of 1F1B, where all parts of a stage's passes take equally long."""

MEAN_OVER_FIRST: Mapping[str, float] = {"one_f_one_b": 0.5, "interleaved": 0.5, "zero_bubble": 0.5}
"""The activations of a rank on average over those of the first one, where later ranks keep fewer micro-batches: about
that of 1F1B with many ranks, which for the others is a guess. It only orders candidates."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Rows of a table, each with every schedule that takes it."""

    rows: Array
    pipelined: Sequence[Pipelined]
    virtual: Array
    bubble: Array
    mean_over_first: Array
    backward: Sequence[tuple[Array, Array]]
    loss: Sequence[tuple[Array, Array]]
    """The micro-batches that are kept and that are queued at the worst moments."""

    @classmethod
    def of(cls, space: Space, sizes: Array) -> Turns:
        sequences = space.sequences(Sizes(*sizes.T))
        columns = np.stack([sizes[:, 0], sequences, sizes[:, 5]], 1)
        where = numbered(columns.T)
        kinds = columns[np.unique(where, return_index=True)[1]]
        of_kinds = [
            [(each, Pipeline(pp, each.virtual, parts)) for each in space.pipelined(pp, of_rank, parts)]
            for pp, of_rank, parts in kinds.tolist()
        ]
        every = [pair for of_kind in of_kinds for pair in of_kind]
        firsts = np.cumsum([0, *map(len, of_kinds)])
        number = np.diff(firsts)[where]
        rows = np.repeat(np.arange(len(where)), number)
        taken = np.arange(len(rows)) - np.repeat(np.cumsum(number) - number, number) + firsts[where[rows]]
        worst = [worst_of(each.schedule, pipeline) for each, pipeline in every]
        return cls(
            rows,
            [every[index][0] for index in taken.tolist()],
            np.array([each.virtual for each, _ in every])[taken],
            np.array([BUBBLES.get(each.schedule, 1 / each.virtual) for each, _ in every])[taken],
            np.array([MEAN_OVER_FIRST.get(each.schedule, 1.0) if of.ranks > 1 else 1.0 for each, of in every])[taken],
            _in_arrays([of.backward for of in worst], taken),
            _in_arrays([of.loss for of in worst], taken),
        )


def _in_arrays(worst: Sequence[Sequence[Waiting]], taken: Array) -> list[tuple[Array, Array]]:
    """What is kept and queued at each of the worst moments; who has fewer of them has the first one again."""
    longest = max(map(len, worst), default=0)
    filled = np.array([(*moments, *[moments[0]] * (longest - len(moments))) for moments in worst])
    return [(filled[taken, moment, 0], filled[taken, moment, 1]) for moment in range(longest)]

"""The schedules of the plans of a table, and what they leave to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.passes.degrees.schedules import Pipeline
from moec.passes.ir.order import SPLIT_BACKWARD
from moec.passes.search.space import Pipelined, Sizes, Space
from moec.passes.search.tables import group_numbers
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
    """Rows of a table, each with every schedule that takes it: one of `schedules`, by its number in `taken`.

    Of each of these: stages of a rank, what is left of a bubble, and the micro-batches that are kept and that are
    queued at the worst moments (`[schedules, moments, 2]`).
    """

    rows: Array
    taken: Array
    schedules: Sequence[Pipelined]
    virtual: Array
    bubble: Array
    mean_over_first: Array
    backward: Array
    loss: Array

    @classmethod
    def of(cls, space: Space, sizes: Sizes) -> Turns:
        columns = np.stack([sizes.pp, space.sequences(sizes), sizes.microbatches], 1)
        where = group_numbers(columns.T)
        distinct = columns[np.unique(where, return_index=True)[1]]
        of_kinds = [
            [(each, Pipeline(pp, each.virtual, parts)) for each in space.pipelined(pp, of_rank, parts)]
            for pp, of_rank, parts in distinct.tolist()
        ]
        every = [pair for of_kind in of_kinds for pair in of_kind]
        firsts = np.cumsum([0, *map(len, of_kinds)])
        number = np.diff(firsts)[where]
        rows = np.repeat(np.arange(len(where)), number)
        taken = np.arange(len(rows)) - np.repeat(np.cumsum(number) - number, number) + firsts[where[rows]]
        worst = [worst_of(each.schedule, pipeline) for each, pipeline in every]
        return cls(
            rows,
            taken,
            [each for each, _ in every],
            np.array([each.virtual for each, _ in every]),
            np.array([BUBBLES.get(each.schedule, 1 / each.virtual) for each, _ in every]),
            np.array([MEAN_OVER_FIRST.get(each.schedule, 1.0) if of.ranks > 1 else 1.0 for each, of in every]),
            _in_array([of.backward for of in worst]),
            _in_array([of.loss for of in worst]),
        )


def _in_array(worst: Sequence[Sequence[Waiting]]) -> Array:
    """What is kept and queued at each of the worst moments. Shorter lists are padded with their first one."""
    longest = max(map(len, worst), default=0)
    return np.array([(*moments, *[moments[0]] * (longest - len(moments))) for moments in worst])

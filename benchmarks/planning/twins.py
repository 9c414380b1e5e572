"""Rows that ran with a learned router beside the same with an even load: the load that explains the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moec.passes.cost.totals import tally
from planning.score import Run

STEEPEST, BISECTIONS = 2.0, 10


@dataclass(frozen=True, slots=True)
class Twin:
    """`routing = zipf(exponent)` gives the speed of the learned router, with so many rows on the busiest rank over the
    mean. `even`: the error of the prediction with an even load."""

    run: Run
    exponent: float
    skew: float
    even: float


def twins(runs: Sequence[Run]) -> list[Twin]:
    found = []
    for run in runs:
        if run.row.learned is not None:
            even, low, high = run.scored(), 0.0, STEEPEST
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                is_faster = even.seconds / with_load(run, middle).step().total > run.row.learned
                low, high = (middle, high) if is_faster else (low, middle)
            uneven = with_load(run, high)
            found.append(Twin(run, high, tally(uneven.program, uneven.spec).imbalance, even.error))
    return found


def with_load(run: Run, exponent: float) -> Run:
    """The row with uneven experts."""
    text = run.row.text.replace("train { ", f"train {{ routing = zipf({exponent}); ")
    return Run.of(replace(run.row, text=text))

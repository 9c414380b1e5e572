"""How many micro-batches a rank of a pipeline keeps at its worst moments, by the table of its schedule."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from moec.passes.degrees.schedules import Pipeline
from moec.passes.place.pipeline_tables import TABLES, rank_of_stage

ROUNDS = 3
"""Micro-batches for each rank, above which no more wait."""


class Waiting(NamedTuple):
    """Micro-batches over all layers of a rank: `kept` for backward, with the one that is computed, and `queued` until
    their products of weights are."""

    kept: float
    queued: float


class Worst(NamedTuple):
    """Moments of a backward pass, and of the loss."""

    backward: tuple[Waiting, ...]
    loss: tuple[Waiting, ...]


@lru_cache(maxsize=4096)
def worst_of(schedule: str, pipeline: Pipeline) -> Worst:
    """The worst moments of the first rank, of the last, and of that with the last stage; all others lie between."""
    if pipeline.ranks == 1:
        return Worst((Waiting(1, 0),), (Waiting(1, 0),))
    most, last = ROUNDS * pipeline.ranks, pipeline.ranks * pipeline.virtual - 1
    if pipeline.microbatches > most and pipeline.microbatches % pipeline.ranks == 0:
        pipeline = pipeline._replace(microbatches=most)
    backward, loss = set[Waiting](), set[Waiting]()
    for rank in {0, pipeline.ranks - 1, rank_of_stage(schedule, pipeline.ranks, last)}:
        kept = queued = 0
        for kind, stage, _ in TABLES[schedule](pipeline, rank):
            now = Waiting(kept / pipeline.virtual, queued / pipeline.virtual)
            if kind != "forward":
                backward.add(now)
            if kind in ("backward", "inputs") and stage == last:
                loss.add(now)
            kept += (kind == "forward") - (kind in ("backward", "inputs"))
            queued += (kind == "inputs") - (kind == "weights")
    return Worst(_most(backward), _most(loss))


def _most(moments: Iterable[Waiting]) -> tuple[Waiting, ...]:
    """The moments of which one has the most bytes, however large what is kept and what is queued: corners of a hull."""
    found = list[Waiting]()
    for moment in sorted(moments, reverse=True):
        if found and moment.queued <= found[-1].queued:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], moment):
            found.pop()
        found.append(moment)
    return tuple(found)


def _slope(one: Waiting, other: Waiting) -> float:
    """What is kept less for each that is queued more."""
    return (one.kept - other.kept) / (other.queued - one.queued)

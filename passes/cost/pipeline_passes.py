"""The passes of a pipeline rank that differ in what else is in memory, and the micro-batches that wait meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from moec.passes.degrees.schedules import Pipeline
from moec.passes.ir.order import Action, ActionKind
from moec.passes.place.pipeline_orders import computations_of, with_messages
from moec.passes.place.pipeline_tables import rank_of_stage

ROUNDS = 3
"""The micro-batches over the ranks, above which no more wait than with fewer."""

WAITS_FOR_ALL = frozenset({"gpipe", "looped_bfs"})
"""The schedules with all forward passes first, so that all micro-batches wait."""

Waiting = tuple[int, ...]

KEPT: tuple[ActionKind, ...] = ("receive", "forward", "loss", "receive_gradients", "inputs")
"""The actions after which a micro-batch waits in a stage."""


class PassPosition(NamedTuple):
    """The position of a pass among those of its stage in a step.

    `is_first`: the first forward pass, or the first pass that computes gradients of weights. `is_last`: the pass in
    which the sums of these gradients begin.
    """

    is_first: bool = False
    is_last: bool = False


class Pass(NamedTuple):
    """A pass in one of a rank's stages, by `place` among these, for all micro-batches that find the same tensors of the
    step."""

    kind: ActionKind
    place: int
    position: PassPosition
    microbatch: int | None


@dataclass(frozen=True)
class RankPasses:
    """The passes of a rank in order. `waiting`: for each the micro-batches that wait meanwhile, wherever they may take
    most; how many in each of `KEPT`, stage by stage."""

    passes: tuple[Pass, ...]
    waiting: tuple[tuple[Waiting, ...], ...]

    @cached_property
    def runs(self) -> tuple[object, ...]:
        """The passes without their micro-batches."""
        return tuple(each[:3] for each in self.passes)

    def most_waiting(self, sizes: Sequence[float]) -> list[float]:
        """For each pass the most bytes of the micro-batches that wait, of which each takes `sizes`."""
        return [max(sum(map(mul, row, sizes)) for row in rows) for rows in self.waiting]

    def largest_waiting(self, number: int, sizes: Sequence[float]) -> Waiting:
        """Those that take most in the pass of this number."""
        return max(self.waiting[number], key=lambda row: sum(map(mul, row, sizes)))

    @classmethod
    def of(cls, stages: Sequence[int], actions: Sequence[Action], last_stage: int) -> RankPasses:
        """Those of the ranks with these stages and actions."""
        places = {stage: place for place, stage in enumerate(stages)}
        ends = {action.stage: action for action in actions if action.kind in ("backward", "weights")}
        counts, latest = [0] * len(stages) * len(KEPT), dict[tuple[int, int | None], int]()
        found, begun, changes = dict[object, tuple[Pass, dict[Waiting, None]]](), set[object](), 0
        for action in actions:
            kind, number = action.kind, action.microbatch
            if number is None or kind in ("send", "send_gradients"):
                continue
            place = places[last_stage if action.stage is None else action.stage]
            if (before := latest.pop((place, number), None)) is not None:
                counts[before] -= 1
            if kind not in ("receive", "receive_gradients"):
                part, position = "backward" if kind == "weights" else kind, PassPosition()
                is_first = part in ("forward", "backward") and (part, place) not in begun
                if is_first or ends[stages[place]] is action:
                    begun.add((part, place))
                    changes, position = changes + 1, PassPosition(is_first, ends[stages[place]] is action)
                key = kind, place, position, changes
                if key not in found:
                    found[key] = Pass(kind, place, position, number), {}
                found[key][1][tuple(counts)] = None
            if kind in KEPT:
                latest[place, number] = place * len(KEPT) + KEPT.index(kind)
                counts[latest[place, number]] += 1
        passes, waiting = zip(*found.values(), strict=True)
        return cls(passes, tuple(map(_most, waiting)))


def _most(waiting: Iterable[Waiting]) -> tuple[Waiting, ...]:
    """Those of which no other one has as many everywhere."""
    most = list[Waiting]()
    for each in waiting:
        if not any(_has_all(other, each) for other in most):
            most = [other for other in most if not _has_all(each, other)] + [each]
    return tuple(most)


def _has_all(one: Waiting, other: Waiting) -> bool:
    return all(map(int.__ge__, one, other))


@lru_cache(maxsize=64)
def passes_of_ranks(schedule: str, pipeline: Pipeline) -> Sequence[RankPasses]:
    """The passes of each rank of a pipeline."""
    most, last = ROUNDS * pipeline.ranks, pipeline.ranks * pipeline.virtual - 1
    if pipeline.microbatches > most and pipeline.microbatches % pipeline.ranks == 0 and schedule not in WAITS_FOR_ALL:
        pipeline = pipeline._replace(microbatches=most)
    ranks = [rank_of_stage(schedule, pipeline.ranks, stage) for stage in range(last + 1)]
    actions: list[list[Action]] = [[] for _ in range(pipeline.ranks)]
    for action in with_messages(computations_of(schedule, pipeline), last):
        actions[ranks[last if action.stage is None else action.stage]].append(action)
    stages = ([stage for stage, of in enumerate(ranks) if of == rank] for rank in range(pipeline.ranks))
    return tuple(RankPasses.of(*pair, last) for pair in zip(stages, actions, strict=True))

"""The computations of each rank of a pipeline in a step, in order: one table for each word of `schedule`.

A rank has `virtual` stages of consecutive layers. Stages follow each other over the ranks in a loop (rank 0 has the
stages 0 and `ranks`), or in a V (rank 0 has the first and the last). A table has no idle slots: a computation waits for
what it needs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moec.passes.degrees.schedules import Pipeline

Kind = Literal["forward", "backward", "inputs", "weights"]
"""`backward` computes all gradients at once; `inputs` those of a stage's inputs, and `weights`, later, the rest."""


class Computation(NamedTuple):
    """What a rank computes for one micro-batch in one of its stages."""

    kind: Kind
    stage: int
    microbatch: int


V_SHAPED = frozenset({"zero_bubble_v", "dual_pipe_v"})
"""The schedules whose stages follow each other in a V."""


def rank_of_stage(schedule: str, ranks: int, stage: int) -> int:
    """The rank, of the `ranks` of a pipeline, that has a stage."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule in V_SHAPED and turn % 2 else place


def in_dependency_order(tables: Sequence[Sequence[Computation]]) -> Iterator[Computation]:
    """The computations of all ranks, each after those whose results it needs; a rank's in the order of its table. Ranks
    take turns, so that it is an order in time if all computations take equally long.

    Raises `ValueError` if ranks wait for each other, or for a computation that no table has.
    """
    last = max(computation.stage for table in tables for computation in table)
    remaining, done = [deque(table) for table in tables], set[Computation]()
    while any(remaining):
        next_of_ranks = [table.popleft() for table in remaining if table and _can_run(table[0], done, last)]
        if not next_of_ranks:
            raise ValueError(f"no rank can go on: they wait at {[table[0] for table in remaining if table]}")
        done.update(next_of_ranks)
        yield from next_of_ranks


def _can_run(computation: Computation, done: set[Computation], last: int) -> bool:
    kind, stage, number = computation
    if kind == "weights":
        return Computation("inputs", stage, number) in done
    if kind == "forward":
        return stage == 0 or Computation("forward", stage - 1, number) in done
    if Computation("forward", stage, number) not in done:
        return False
    following = (Computation("backward", stage + 1, number), Computation("inputs", stage + 1, number))
    return stage == last or not done.isdisjoint(following)


@dataclass(slots=True)
class _Rank:
    """Writes the table of one rank, stage by stage: each time for the next micro-batch. `place` numbers its stages."""

    stages: Sequence[int]
    table: list[Computation] = field(default_factory=list)
    forwards: Counter[int] = field(default_factory=Counter)
    backwards: Counter[int] = field(default_factory=Counter)
    pending: deque[Computation] = field(default_factory=deque)

    def forward(self, place: int) -> None:
        self._take("forward", place, self.forwards)

    def backward(self, place: int) -> None:
        self._take("backward", place, self.backwards)

    def inputs(self, place: int) -> None:
        """The gradients of inputs; those of weights are pending."""
        self._take("inputs", place, self.backwards)
        self.pending.append(self.table[-1]._replace(kind="weights"))

    def weights(self, place: int | None = None) -> None:
        """The pending gradients of weights that have waited longest, of all stages or of one; nothing if none are."""
        waiting = (c for c in self.pending if place is None or c.stage == self.stages[place])
        if (oldest := next(waiting, None)) is not None:
            self.pending.remove(oldest)
            self.table.append(oldest)

    def _take(self, kind: Kind, place: int, passes: Counter[int]) -> None:
        self.table.append(Computation(kind, self.stages[place], passes[place]))
        passes[place] += 1


def _in_loop(pipeline: Pipeline, rank: int) -> _Rank:
    return _Rank(range(rank, pipeline.ranks * pipeline.virtual, pipeline.ranks))


def _in_v(pipeline: Pipeline, rank: int) -> _Rank:
    return _Rank((rank, 2 * pipeline.ranks - 1 - rank))


def gpipe(pipeline: Pipeline, rank: int) -> list[Computation]:
    """All forward passes, then all backward passes (arXiv 1811.06965, figure 2)."""
    writer = _in_loop(pipeline, rank)
    for take in (writer.forward, writer.backward):
        for _ in range(pipeline.microbatches):
            take(0)
    return writer.table


def one_f_one_b(pipeline: Pipeline, rank: int) -> list[Computation]:
    """Forward and backward passes in turn, as soon as the first gradient is there (arXiv 2104.04473, section 2.2)."""
    writer, ahead = _in_loop(pipeline, rank), pipeline.ranks - 1 - rank
    for step in range(pipeline.microbatches + ahead):
        if step < pipeline.microbatches:
            writer.forward(0)
        if step >= ahead:
            writer.backward(0)
    return writer.table


def looped_bfs(pipeline: Pipeline, rank: int) -> list[Computation]:
    """All micro-batches through a stage before the rank's next one (breadth first, arXiv 2211.05953)."""
    stages, numbers = _in_loop(pipeline, rank).stages, range(pipeline.microbatches)
    forwards = [Computation("forward", stage, number) for stage in stages for number in numbers]
    return forwards + [computation._replace(kind="backward") for computation in reversed(forwards)]


def interleaved(pipeline: Pipeline, rank: int) -> list[Computation]:
    """1F1B over several stages, a round of micro-batches through each (arXiv 2104.04473, section 2.2)."""
    writer = _in_loop(pipeline, rank)
    _in_rounds(pipeline, writer, 2 * (pipeline.ranks - 1 - rank), writer.backward)
    return writer.table


def zero_bubble(pipeline: Pipeline, rank: int) -> list[Computation]:
    """`interleaved` with half as many passes ahead, where gradients of weights wait (ZB-H1 of arXiv 2401.10241)."""
    writer, backwards = _in_loop(pipeline, rank), 0

    def backward(place: int) -> None:
        nonlocal backwards
        writer.inputs(place)
        if backwards >= rank:
            writer.weights()
        backwards += 1

    _in_rounds(pipeline, writer, pipeline.ranks - 1 - rank, backward)
    while writer.pending:
        writer.weights()
    return writer.table


def _in_rounds(pipeline: Pipeline, writer: _Rank, ahead: int, backward: Callable[[int], None]) -> None:
    """Forward and backward passes in turn, in rounds. Before its first backward pass a rank makes `ahead` more forward
    passes than the last rank."""
    virtual, per_round = pipeline.virtual, pipeline.per_round
    passes = virtual * pipeline.microbatches
    ahead = min(passes, ahead + (virtual - 1) * per_round)
    for step in range(passes + ahead):
        if step < passes:
            writer.forward(step // per_round % virtual)
        if step >= ahead:
            backward(virtual - 1 - (step - ahead) // per_round % virtual)


def zero_bubble_v(pipeline: Pipeline, rank: int) -> list[Computation]:
    """Two stages in a V, all gradients of weights apart (ZB-V of arXiv 2401.10241)."""
    writer, after = _in_v(pipeline, rank), pipeline.ranks - rank
    microbatches = max(pipeline.microbatches, 2 * pipeline.ranks - 1)  # fewer leave holes in the same table

    def both_gradients(place: int) -> None:
        writer.inputs(place)
        writer.weights(place)

    for _ in range(2 * after - 1):
        writer.forward(0)
    for _ in range(rank):
        writer.forward(1)
        writer.forward(0)
    for _ in range(after):
        writer.forward(1)
        both_gradients(1)
    while writer.forwards[1] < microbatches:
        if writer.forwards[0] < microbatches:
            writer.forward(0)
        both_gradients(0)
        writer.forward(1)
        both_gradients(1)
    for _ in range(rank):
        writer.inputs(0)
        writer.inputs(1)
    for _ in range(after):
        writer.inputs(0)
        writer.weights(0)
    for place in (1, 0):
        for _ in range(rank):
            writer.weights(place)
    return [computation for computation in writer.table if computation.microbatch < pipeline.microbatches]


def dual_pipe_v(pipeline: Pipeline, rank: int) -> list[Computation]:
    """Two stages in a V; in its middle each forward pass may run beside a backward pass of the other stage.

    DeepSeek's DualPipe, cut in half (github.com/deepseek-ai/DualPipe). Gradients of weights wait only near both ends.
    """
    writer, after = _in_v(pipeline, rank), pipeline.ranks - rank - 1
    for _ in range(2 * after):
        writer.forward(0)
    for _ in range(rank + 1):
        writer.forward(0)
        writer.forward(1)
    for _ in range(after):
        writer.inputs(1)
        writer.weights()
        writer.forward(1)
    for _ in range(pipeline.microbatches - 2 * pipeline.ranks + rank + 1):
        writer.forward(0)
        writer.backward(1)
        writer.forward(1)
        writer.backward(0)
    for _ in range(after):
        writer.backward(1)
        writer.forward(1)
        writer.backward(0)
    for number in range(2 * (rank + 1)):  # the second half of these passes leaves its gradients of weights for later
        take = writer.inputs if number > rank else writer.backward
        take(1 - number % 2)
    for _ in range(after):
        writer.weights()
        writer.inputs(0)
    while writer.pending:
        writer.weights()
    return writer.table


TABLES: dict[str, Callable[[Pipeline, int], list[Computation]]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zero_bubble": zero_bubble,
    "zero_bubble_v": zero_bubble_v,
    "dual_pipe_v": dual_pipe_v,
}
"""The table of a rank, by the word of `schedule`."""

"""The orders of a step: the computations of a schedule's table, with what stages send each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from moec.passes.degrees.schedules import Pipeline, takes
from moec.passes.ir import Program
from moec.passes.ir.order import Action, Order, in_turn
from moec.passes.place.pipeline_tables import TABLES, Computation, Kind, in_dependency_order


@lru_cache(maxsize=8)
def computations_of(schedule: str, pipeline: Pipeline) -> Sequence[Computation]:
    """The computations of all ranks by a schedule, each after those whose results it needs."""
    return tuple(in_dependency_order([TABLES[schedule](pipeline, rank) for rank in range(pipeline.ranks)]))


def pipeline_of(program: Program, microbatches: int) -> Pipeline:
    """The pipeline of a Program with so many micro-batches in a step."""
    return Pipeline(len(program.stages_by_rank), len(program.stages_by_rank[0]), microbatches)


def orders_of(program: Program, microbatches: int) -> tuple[Order, ...]:
    """The order of each pipeline rank by the Program's schedule; of a single stage each micro-batch in turn.

    Two ranks have what they send each other in the same order, and a rank receives as soon as the other one sends: no
    send waits for a receive that comes later.
    """
    if len(program.stages) < 2:
        return (in_turn(program.kinds_of_stage(0), program.final_kinds, microbatches),)
    return _with_computations(program, computations_of(program.schedule, pipeline_of(program, microbatches)))


def takes_microbatches(program: Program, microbatches: int) -> bool:
    """Whether the Program's schedule has an order of so many micro-batches; any number in a single stage."""
    return len(program.stages) < 2 or takes(program.schedule, pipeline_of(program, microbatches))


def orders_in_turn(program: Program, microbatches: int) -> tuple[Order, ...]:
    """The orders in which each micro-batch goes through all stages, forward and backward, before the next one: for any
    number of micro-batches, and no table."""
    if len(program.stages) < 2:
        return orders_of(program, microbatches)
    stages = range(len(program.stages))
    passes: tuple[tuple[Kind, Sequence[int]], ...] = (("forward", stages), ("backward", stages[::-1]))
    return _with_computations(
        program,
        (Computation(kind, s, number) for number in range(microbatches) for kind, order in passes for s in order),
    )


def _with_computations(program: Program, computations: Iterable[Computation]) -> tuple[Order, ...]:
    """The orders of all ranks with these computations of all, each after those whose results it needs."""
    end, last = [Action(kind) for kind in program.final_kinds], len(program.stages) - 1
    actions_of: dict[tuple[int, ...], list[Action]] = {stages: [Action("agree")] for stages in program.stages_by_rank}
    of_stage = {stage: actions for stages, actions in actions_of.items() for stage in stages}
    for action in with_messages(computations, last):
        of_stage[last if action.stage is None else action.stage].append(action)
    return tuple(Order(stages, (*actions, *end)) for stages, actions in actions_of.items())


def with_messages(computations: Iterable[Computation], last: int) -> Iterator[Action]:
    """The computations of all ranks, each followed by the messages with its results. The stage `last` computes the loss
    after its forward pass."""
    for kind, stage, number in computations:
        yield Action(kind, stage, number)
        if kind == "forward" and stage == last:
            yield Action("loss", None, number)
        elif kind == "forward":
            yield Action("send", stage, number)
            yield Action("receive", stage + 1, number)
        elif kind != "weights" and stage > 0:
            yield Action("send_gradients", stage, number)
            yield Action("receive_gradients", stage - 1, number)

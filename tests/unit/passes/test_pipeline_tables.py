"""The order in which ranks of a pipeline compute, for each word of `schedule`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from support.tables import each_row
from torch.distributed.pipelining import schedules

from moec.grammar.spec.parallel import Schedule
from moec.grammar.stated import STAGES_OF_RANK
from moec.passes.degrees.schedules import Pipeline
from moec.passes.place.pipeline_tables import TABLES, Computation, in_dependency_order

OF_TORCH: dict[str, Any] = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zero_bubble_v": schedules.ScheduleZBVZeroBubble,
    "dual_pipe_v": schedules.ScheduleDualPipeV,
}
"""Torch's own tables. Its GPipe and 1F1B have none that torch runs."""

KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights"}


def pipelines(word: str) -> Iterator[Pipeline]:
    """The pipelines of 2 to 8 ranks, 1 to 3 stages each, and 2 to 16 micro-batches that the schedule takes."""
    one, two = word in ("gpipe", "one_f_one_b"), word in ("zero_bubble_v", "dual_pipe_v")
    for ranks in range(2, 9):
        for virtual in (1,) if one else (2,) if two else (1, 2, 3):
            for microbatches in range(2, 17):
                pipeline = Pipeline(ranks, virtual, microbatches)
                whole_rounds = microbatches % pipeline.per_round == 0
                takes = {
                    "dual_pipe_v": microbatches >= 2 * ranks,
                    "interleaved": whole_rounds,
                    "zero_bubble": whole_rounds,
                }
                if takes.get(word, True):
                    yield pipeline


def tables_of(word: str, pipeline: Pipeline) -> list[list[Computation]]:
    return [TABLES[word](pipeline, rank) for rank in range(pipeline.ranks)]


def torchs_tables(word: str, pipeline: Pipeline) -> list[list[Computation]]:
    """The tables of torch's class, which without stages is never initialised."""
    schedule = object.__new__(OF_TORCH[word])
    schedule.pp_group_size, schedule.n_local_stages = pipeline.ranks, pipeline.virtual
    schedule._stages, schedule._n_microbatches = [None] * pipeline.virtual, pipeline.microbatches
    schedule.microbatches_per_round = pipeline.per_round
    schedule.num_stages = schedule._num_stages = pipeline.ranks * pipeline.virtual
    tables = []
    for rank in range(pipeline.ranks):
        actions = filter(None, schedule._calculate_single_rank_operations(rank))
        flat = [single for action in actions for single in (action.sub_actions or (action,))]
        tables.append([Computation(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in flat])
    return tables


def test_every_word_has_a_table():
    assert TABLES.keys() == {*get_args(Schedule)}
    assert STAGES_OF_RANK.keys() == {*get_args(Schedule), "auto"}


@each_row("word", OF_TORCH)
def test_a_table_is_torchs(word: str):
    for pipeline in pipelines(word):
        assert tables_of(word, pipeline) == torchs_tables(word, pipeline), pipeline


@each_row("word", TABLES)
def test_every_computation_is_taken_once_and_finds_what_it_needs(word: str):
    for pipeline in pipelines(word):
        stages, numbers = range(pipeline.ranks * pipeline.virtual), range(pipeline.microbatches)
        taken = list(in_dependency_order(tables_of(word, pipeline)))
        whole = [{"forward", "backward"}, {"forward", "inputs", "weights"}]
        of_each = {(stage, number): set[str]() for stage in stages for number in numbers}
        for kind, stage, number in taken:
            assert kind not in of_each[stage, number]
            of_each[stage, number].add(kind)
        assert all(kinds in whole for kinds in of_each.values()), pipeline


@each_row("word", ["gpipe", "one_f_one_b"])
def test_ranks_keep_the_activations_of_as_many_micro_batches_as_is_said(word: str):
    for pipeline in pipelines(word):
        for rank, table in enumerate(tables_of(word, pipeline)):
            kept = most = 0
            for computation in table:
                kept += 1 if computation.kind == "forward" else -1
                most = max(most, kept)
            assert most == min(
                pipeline.microbatches, pipeline.ranks - rank if word == "one_f_one_b" else pipeline.microbatches
            )


@pytest.mark.parametrize("fault", ["missing", "too early"])
def test_ranks_that_cannot_go_on_are_told(fault: str):
    tables = tables_of("one_f_one_b", Pipeline(2, 1, 4))
    if fault == "missing":
        tables[0].remove(Computation("forward", 0, 2))
    else:
        tables[0].insert(0, tables[0].pop(tables[0].index(Computation("backward", 0, 3))))
    with pytest.raises(ValueError, match="no rank can go on: they wait at"):
        list(in_dependency_order(tables))

"""The cost of pipelines: micro-batches under way, the bubble, and totals that equal those of a single stage."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from support.plans import moe_spec
from support.staged_plans import staged_plan
from support.tables import each_row

from moec.codegen.plan import Plan
from moec.commands.inspecting.pipeline_lines import order_in_words, pipeline_lines
from moec.commands.inspecting.summary import summary
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.cost import memory, pipeline_passes
from moec.passes.cost.memory import memory_of, memory_of_ranks
from moec.passes.cost.parameter_counts import count_parameters
from moec.passes.cost.pipeline_time import StageSeconds
from moec.passes.cost.stage_memory import StageMemory
from moec.passes.cost.step_time import pipeline_time, stages_of, step_seconds
from moec.passes.cost.totals import activation_bytes, costs_of, tally
from moec.passes.degrees.schedules import Pipeline
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program

PP = 4


@cache
def plan_of(
    schedule: str, microbatches: int = 8, pp: int = PP, virtual: int = 1, model: str = "", zero: int = 0
) -> Plan:
    """A pipeline of micro-batches of 8 sequences, with two layers in each of 4 or 8 stages."""
    spec = moe_spec(depth=2 * pp * virtual, batch=8 * microbatches, microbatches=microbatches, dim=32, model=model)
    return staged_plan(spec, pp, virtual, schedule)


def activations(plan: Plan, rank: int) -> float:
    """The activations at the worst moment of the forward pass of a rank's last layer."""
    memory = memory_of_ranks(plan.program, plan.spec)[rank]
    event = f"forward of layer {max(number for layer in memory.layers.values() for number in layer.numbers)}"
    return next(moment.bytes.of["activations"] for moment in memory.moments if moment.event == event)


@pytest.mark.parametrize("rank", range(PP))
def test_micro_batches_in_flight_are_all_in_gpipe_and_fewer_on_each_later_rank_of_1f1b(rank: int) -> None:
    four, eight = (activations(plan_of("gpipe", number), rank) for number in (4, 8))
    one = (eight - four) / 4  # each further micro-batch
    layers = memory_of_ranks(plan_of("gpipe").program, plan_of("gpipe").spec)[rank].layers.values()
    assert one == pytest.approx(sum(len(layer.numbers) * layer.kept.total for layer in layers), rel=0.2)
    first = eight - 7 * one
    assert 0 < first < 2 * one
    assert activations(plan_of("one_f_one_b"), rank) == pytest.approx(first + (PP - rank - 1) * one)


def test_the_peak_of_1f1b_does_not_grow_with_micro_batches_and_takes_no_more_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    run = StageMemory.run
    for number in (8, 32):
        passes: list[str] = []
        monkeypatch.setattr(
            StageMemory, "run", lambda self, kind, place, p=passes: p.append(kind) or run(self, kind, place)
        )
        plan = plan_of("one_f_one_b", number)
        found.append(([memory.peak for memory in memory_of_ranks(plan.program, plan.spec)], passes))
    assert found[0] == found[1]


STAGES = {"one_f_one_b": 1, "interleaved": 3, "zero_bubble": 2, "zero_bubble_v": 2, "dual_pipe_v": 2}


@each_row("schedule", STAGES)
def test_no_more_wait_than_of_three_micro_batches_for_each_rank(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rounds in (pipeline_passes.ROUNDS, 9):
        monkeypatch.setattr(pipeline_passes, "ROUNDS", rounds)
        ranks = pipeline_passes.passes_of_ranks.__wrapped__(schedule, Pipeline(PP, STAGES[schedule], 8 * PP))
        found.append([(rank.runs, [set(waiting) for waiting in rank.waiting]) for rank in ranks])
    assert found[0] == found[1]


@each_row("schedule", ["one_f_one_b", "zero_bubble_v"])
def test_ranks_whose_stages_are_equal_have_the_memory_that_each_has_by_itself(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(schedule, 8, PP, STAGES[schedule])
    together = memory_of_ranks(plan.program, plan.spec)
    monkeypatch.setattr(memory, "_without_names", lambda *_: None)
    assert memory_of_ranks(plan.program, plan.spec) == together


def test_ranks_of_a_v_keep_about_equally_much_where_those_of_1f1b_do_not() -> None:
    ratios = []
    for plan in (plan_of("one_f_one_b"), plan_of("zero_bubble_v", 8, 4, 2)):
        kept = [memory.peak.bytes.of["activations"] for memory in memory_of_ranks(plan.program, plan.spec)]
        ratios.append(max(kept) / min(kept))
    assert ratios[0] > 3
    assert ratios[1] < 1.2


def test_rows_and_gradients_wait_for_the_products_of_weights() -> None:
    plan = plan_of("zero_bubble")
    last = memory_of_ranks(plan.program, plan.spec)[-1]
    waiting = {moment.event: moment.bytes.of for moment in last.moments}["backward to weights of layer 7"]
    assert waiting["work"] > 0
    without = memory_of_ranks(plan_of("one_f_one_b").program, plan.spec)[-1]
    assert last.peak.bytes.of["activations"] > 2 * without.peak.bytes.of["activations"]
    both = [next(moment for moment in memory.moments if moment.event == "loss") for memory in (last, without)]
    assert both[0].bytes.of["logits and loss"] == both[1].bytes.of["logits and loss"]


BUBBLES = {
    "gpipe": (1, 3 / 11), "one_f_one_b": (1, 3 / 11), "interleaved": (2, 3 / 19), "looped_bfs": (2, 3 / 19)
}  # fmt: skip
"""Stages of each rank, and the bubble (pp - 1) / (virtual · m + pp - 1) of 8 micro-batches."""


@each_row("schedule", BUBBLES)
def test_the_bubble_of_equal_stages_is_the_textbooks(schedule: str) -> None:
    virtual, bubble = BUBBLES[schedule]
    program = plan_of(schedule, 8, PP, virtual).program
    equal = pipeline_time(program, [StageSeconds(forward=1, backward=2)] * PP * virtual)
    assert equal.bubble == pytest.approx(bubble)
    assert equal.busy == (24 * virtual,) * PP
    assert pipeline_time(program, [StageSeconds(forward=1, backward=2, message=1)] * PP * virtual).bubble > bubble


def test_products_of_weights_fill_the_bubble() -> None:
    stages = [StageSeconds(forward=1, backward=2, weights=1)] * PP
    whole, split = (pipeline_time(plan_of(s).program, stages) for s in ("one_f_one_b", "zero_bubble"))
    assert whole.busy == split.busy
    assert split.bubble < whole.bubble


def test_a_step_takes_as_long_as_its_slowest_rank_and_less_than_all_ranks_in_turn() -> None:
    plan = plan_of("one_f_one_b")
    costs = costs_of(plan.program, Workload.of_microbatch(plan.spec, plan.program))
    whole = compile_program(plan.spec).program
    one = step_seconds(costs_of(whole, Workload.of_microbatch(plan.spec, whole)), whole, plan.spec).total
    time = pipeline_time(plan.program, [s.seconds for s in stages_of(costs, plan.program, plan.spec)])
    step = step_seconds(costs, plan.program, plan.spec).total
    after_passes = step - max(time.ends)  # the sums of gradients and the optimizer's step
    assert 0 < after_passes < step / 5
    assert max(time.ends) < step < one


@each_row("model", ["", "embedding = tokens(tied = true);"])
def test_totals_equal_those_of_a_single_stage(model: str) -> None:
    plan = plan_of("zero_bubble_v", 8, 4, 2, model)
    whole = compile_program(plan.spec).program
    staged, one = tally(plan.program, plan.spec), tally(whole, plan.spec)
    for name in ("parameters", "active_parameters", "flops_per_token", "tokens", "imbalance"):
        assert getattr(staged, name) == getattr(one, name), name
    counts = [count_parameters(program, plan.spec).whole for program in (plan.program, whole)]
    assert (counts[0].total, counts[0].active) == (counts[1].total, counts[1].active)
    assert counts[0].per_rank == staged.local_parameters
    assert one.local_parameters / 4 <= staged.local_parameters < one.local_parameters / 2
    workload = Workload.of(plan.spec, whole).even
    kept = activation_bytes(plan.program, costs_of(plan.program, workload))
    assert kept == pytest.approx(activation_bytes(whole, costs_of(whole, workload)), rel=1e-3)


def test_a_tied_embedding_is_there_once_on_a_rank_and_on_two_ranks_is_summed_between_them() -> None:
    masters = {}
    for model in ("", "embedding = tokens(tied = true);"):
        plan = plan_of("zero_bubble_v", 8, 4, 2, model)
        masters[model] = memory_of_ranks(plan.program, plan.spec)[0].peak.bytes.of["parameters"]
    assert masters[""] - masters["embedding = tokens(tied = true);"] == 4 * 32 * 32  # the head's weight
    apart = plan_of("one_f_one_b", 8, 2, 1, "embedding = tokens(tied = true);")
    assert [(f.purpose, f.ranks) for f in tally(apart.program, apart.spec).traffic if f.group == "pp"] == [
        ("send of tokens between stages", 2), ("all_reduce of gradients", 2)
    ]  # fmt: skip


def test_the_budget_refuses_the_rank_that_takes_most() -> None:
    plan = plan_of("gpipe")
    device = plan.spec.cluster.device
    peak = memory_of(plan.program, plan.spec).peak.bytes.total
    small = plan.spec.replace(cluster=plan.spec.cluster.replace(device=device.replace(memory=peak - 1)))
    with pytest.raises(DiagnosticError) as refused:
        staged_plan(small, PP, 1, "gpipe")
    (diagnostic,) = refused.value.diagnostics
    assert " on ranks 12..15, of stage 3, most in the " in diagnostic.message
    assert "fit" in diagnostic.help


def test_a_summary_has_a_line_for_each_rank_and_short_orders() -> None:
    plan = plan_of("one_f_one_b")
    lines = pipeline_lines(plan.program, plan.spec)
    assert lines[0].startswith("  pipeline  4 stages by `one_f_one_b`: the busiest rank waits ")
    assert lines[2].startswith("            ranks 4..7, of stage 1: layers 2..3, ")
    assert [line.partition(": ")[2] for line in lines[5:]] == [
        "4 × forward, 4 × (backward, forward), 4 × backward", "8 × (forward, backward)"
    ]  # fmt: skip
    assert set(lines) <= set(summary(plan, plan.program, Path("a.plan"), 0.1).splitlines())
    assert len(order_in_words(plan_of("zero_bubble_v", 8, 4, 2).program.orders[0])) < 300
    assert pipeline_lines(compile_program(plan.spec).program, plan.spec) == []

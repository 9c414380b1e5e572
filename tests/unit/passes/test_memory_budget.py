"""The memory of a training step: sums by hand, for plans whose layouts and words are changed one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.plans import moe_spec, moe_text
from support.tables import each_row

from moec.grammar import load_text
from moec.grammar.spec import Spec
from moec.passes.cost.buffers import Buffers
from moec.passes.cost.largest_skew import largest_skew
from moec.passes.cost.memory import Memory, memory_of
from moec.passes.cost.totals import tally
from moec.passes.ir import Block, Layout, Program, Shard
from moec.passes.ir.row_table import table_length
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program

SIZES = {"dim": 32, "expert": "swiglu(64)", "batch": 16, "sequence": 32}


def placed(**options: Any) -> tuple[Program, Spec]:
    spec = moe_spec(**SIZES | options)
    return compile_program(spec).program, spec


def changed(program: Program, **changes: object) -> Program:
    """The Program with the same change to every layer."""
    layers = program.layer_blocks
    return replace(program, blocks=tuple(replace(b, **changes) if b.name in layers else b for b in program.blocks))


def at(memory: Memory, event: str) -> dict[str, float]:
    """The bytes by kind at the last such event."""
    (*_, moment) = (moment for moment in memory.moments if moment.event == event)
    return dict(moment.bytes.of)


def test_masters_gradients_and_moments_are_sixteen_bytes_a_parameter() -> None:
    program, spec = placed()
    local = tally(program, spec).local_parameters
    last = at(memory_of(program, spec), "optimizer step")
    assert last == {"parameters": 4 * local, "gradients": 4 * local, "optimizer": 8 * local}


def test_below_fp32_a_layers_weights_are_copied_while_it_runs_and_kept_if_they_are_saved() -> None:
    (wide, spec), (narrow, narrow_spec) = placed(), placed(dtype="bf16")
    assert "compute copies" not in at(memory_of(wide, spec), "loss")
    local = tally(narrow, narrow_spec).local_parameters
    table = 2 * 32 * 32  # no backward reads the embedding's table
    routers = 2 * 2 * 8 * 32  # the router saves a wide copy of its weight instead
    assert at(memory_of(narrow, narrow_spec), "loss")["compute copies"] == 2 * local - table - routers


def test_activations_before_the_loss_are_those_that_ops_save() -> None:
    program, spec = placed()
    before = at(memory_of(program, spec), "forward of the head")
    saved, logits = tally(program, spec).activation_bytes, 4 * 4 * 32 * 32
    assert before["activations"] == pytest.approx(saved - logits, rel=0.01)  # the loss saves log-probabilities


def test_logits_take_three_times_their_bytes_in_the_loss() -> None:
    """Their log-probabilities, and the gradients of both: a step drops the logits before backward."""
    program, spec = placed()
    assert at(memory_of(program, spec), "loss")["logits and loss"] == pytest.approx(3 * 4 * 4 * 32 * 32, rel=0.05)


def test_micro_batches_divide_activations_and_leave_gradients_between_them() -> None:
    program, spec = placed()
    whole, parts = memory_of(program, spec), memory_of(replace(program, microbatches=2), spec)
    one, two = (at(memory, "forward of layer 2")["activations"] for memory in (whole, parts))
    assert two == pytest.approx(one / 2, rel=1e-3)  # row counts stay
    local = tally(program, spec).local_parameters
    assert at(parts, "forward of the embedding")["gradients"] == pytest.approx(4 * local)
    assert "gradients" not in at(whole, "forward of the embedding")


def test_a_recomputed_layer_keeps_its_inputs_and_the_routers_choices() -> None:
    program, spec = placed()
    layer = memory_of(changed(program, recompute="layer"), spec).layers["layers[1..2]"]
    tokens = 4 * 32
    probabilities, choices, residual = 4 * tokens * 8, (4 + 8) * tokens * 2, 4 * tokens * 32
    received_counts = 8 * 8
    assert layer.kept.of == {"activations": probabilities + choices + residual + received_counts}
    assert len(layer.run.inputs) == 1


def test_layers_keep_all_activations_but_those_of_embedding_head_and_loss() -> None:
    program, spec = placed()
    memory = memory_of(program, spec)
    of_layers = sum(len(layer.numbers) * layer.kept.total for layer in memory.layers.values())
    tokens = 4 * 32
    wide, inverse_rms, ids = 4 * tokens * 32, 4 * tokens, 8 * tokens
    head = 3 * wide + inverse_rms  # the last norm's input, its normalized rows, and its result, which the product reads
    loss = wide + ids  # log-probabilities and labels
    others = ids + head + loss  # the embedding keeps its ids
    assert of_layers == pytest.approx(tally(program, spec).activation_bytes - others, rel=1e-3)


def test_recomputed_experts_keep_their_rows_and_no_pre_activations() -> None:
    program, spec = placed(ep=2)
    runs = [memory_of(p, spec).layers["layers[1..2]"].run for p in (program, changed(program, recompute="experts"))]
    rows, experts = 4 * 32 * 2, 4
    hidden, table = 4 * rows * 2 * 64, 4 * table_length(rows, experts)
    assert runs[0].kept.total - runs[1].kept.total == pytest.approx(hidden + table)


def cut_over_dp(block: Block, stage: int) -> Block:
    """ZeRO's layouts of the norms and the attention of a layer over four ranks, by hand."""
    parameters = []
    for p in block.parameters:
        if p.layout is not None and not p.layout.axes and p.shape[0] % 4 == 0:
            cut = Layout.of({"dp": Shard(0)})
            p = replace(p, optimizer_state=cut, gradient=cut if stage > 1 else p.gradient)
        parameters.append(p)
    return replace(block, parameters=tuple(parameters))


@each_row("stage", [1, 2])
def test_zero_cuts_masters_states_and_the_gradients_that_the_optimizer_reads(stage: int) -> None:
    program, spec = placed()
    zero = replace(program, blocks=tuple(cut_over_dp(block, stage) for block in program.blocks), microbatches=2)
    whole = replace(program, microbatches=2)
    cut = [p for b in zero.blocks for p in b.parameters if p.optimizer_state != p.layout]
    elements = sum(
        p.shape[0] * (p.shape[1] if len(p.shape) > 1 else 1) * (p.shape[2] if len(p.shape) > 2 else 1)
        * (2 if "1..2" in b.name else 1)
        for b in zero.blocks for p in b.parameters if p in cut
    )  # fmt: skip
    before, after = (at(memory_of(p, spec), "optimizer step") for p in (whole, zero))
    assert sum(before.values()) - sum(after.values()) == pytest.approx(16 * elements * 3 / 4)
    between = [at(memory_of(p, spec), "forward of the embedding")["gradients"] for p in (whole, zero)]
    assert between[0] - between[1] == pytest.approx(4 * elements * 3 / 4 if stage > 1 else 0)


def test_scattered_gradients_of_earlier_micro_batches_are_there_beside_those_of_the_last() -> None:
    program, spec = placed()
    zero = replace(program, blocks=tuple(cut_over_dp(block, 2) for block in program.blocks))
    one, two = (at(memory_of(replace(zero, microbatches=n), spec), "gradient sums")["gradients"] for n in (1, 2))
    assert two == 2 * one


def test_weights_gathered_for_several_micro_batches_stay_until_the_step_ends() -> None:
    program, spec = placed()
    zero = replace(program, blocks=tuple(cut_over_dp(block, 1) for block in program.blocks), microbatches=2)
    memory = memory_of(zero, spec)
    assert at(memory, "gradient sums")["compute copies"] > 0
    assert "compute copies" not in at(memory, "optimizer step")


def test_the_busiest_rank_takes_more_and_the_largest_load_that_fits_is_found() -> None:
    text = moe_text(**SIZES | {"batch": 64}, ep=4)
    spec = load_text(text).unwrap()
    program = compile_program(spec).program
    even, uneven = (
        memory_of(program, spec, replace(Workload.of_microbatch(spec, program), exponent=e)).peak.bytes.total
        for e in (0.0, 1.0)
    )
    assert even < uneven
    assert largest_skew(program, spec) is None  # 4 GiB

    def with_memory(size: float) -> Spec:
        return spec.replace(cluster=spec.cluster.replace(device=spec.cluster.device.replace(memory=size)))

    skew = 4 * (1 + 1 / 2) / sum(1 / n for n in range(1, 9))  # the first two of eight experts, by i⁻¹
    assert largest_skew(program, with_memory(uneven)) == pytest.approx(skew, rel=1e-2)
    assert largest_skew(program, with_memory(even - 1)) == 0


def test_a_tensor_with_two_names_is_freed_with_the_last() -> None:
    alive = Buffers()
    alive.add("a", "work", 8.0)
    alive.alias("b", "a")
    alive.save("a", 8.0)
    alive.drop("a")
    alive.drop("b")
    assert alive.bytes().of == {"activations": 8.0}
    alive.drop("saved a")
    assert alive.bytes().total == 0

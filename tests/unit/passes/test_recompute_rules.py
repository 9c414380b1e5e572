"""`microbatches` and `recompute`: their rules, their text in a Program, and what `compile` and `inspect` list."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inspected_text import inspected
from support.plans import layer_text, moe_plan, moe_text
from support.tables import each_row

from moec.commands.inspecting.summary import summary
from moec.grammar import check, load_text
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.diagnostics.diagnostic import Severity
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import IrError
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program


def found(text: str) -> list[Diagnostic]:
    """The diagnostics of the two words, by `moec check`; those of a Spec made in Python are the same."""
    loaded = load_text(text)
    codes = ("MOE0330", "MOE0331", "MOE0332", "MOE0322")
    given = [each for each in loaded.diagnostics if each.code in codes]
    if loaded.spec is not None:
        assert [each for each in check(loaded.spec) if each.code in codes] == given
        try:
            choose_degrees(loaded.spec)
        except DiagnosticError as error:
            given += error.diagnostics
    return given


@each_row(("batch", "parts", "help"), [(8, 3, "`microbatches = 2` or `batch = 12`"), (16, 8, "4` or `batch = 32`")])
def test_micro_batches_divide_a_ranks_sequences(batch: int, parts: int, help: str) -> None:
    (problem,) = found(moe_text(batch=batch, microbatches=parts))
    assert problem.code == "MOE0330"
    assert help in problem.help
    assert problem.span
    assert problem.labels[0].message == f"{batch // 4} sequences per data-parallel rank, of 4"


@each_row(("tp", "parts"), [(1, 2), (2, 4), (4, 8)])
def test_ranks_of_a_tp_group_share_their_sequences(tp: int, parts: int) -> None:
    assert not found(moe_text(batch=8, tp=tp, microbatches=parts))
    assert found(moe_text(batch=8, tp=tp, microbatches=2 * parts))


@each_row(
    ("recompute", "count"),
    [
        ("experts", 0),
        ("layer", 0),
        ("layers 0 { recompute = layer }", 0),
        ("layers 0..1 { recompute = experts }", 0),
        ("layers 0 { recompute = experts }", 1),
        ("recompute = experts; layers 0 { recompute = experts } layers 0 { recompute = experts }", 2),
    ],
)
def test_experts_are_recomputed_only_where_there_are_some(recompute: str, count: int) -> None:
    warnings = found(moe_text(recompute=recompute))
    assert [each.code for each in warnings] == ["MOE0331"] * count
    for each in warnings:
        assert each.labels[0].message == "layer 0 has this instead of experts"
        assert each.severity is Severity.WARNING


def test_a_layers_host_decides_its_micro_batches() -> None:
    (problem,) = found(layer_text(tail="parallel { microbatches = 2 }"))
    assert problem.code == "MOE0332"
    assert not found(layer_text(tail="parallel { recompute = layer }"))


def test_a_batch_group_has_the_tokens_of_one_micro_batch() -> None:
    """16 places are as many as a micro-batch of two sequences of 8 tokens can need."""
    options = {"batch": 4, "ranks": 1, "ep": 1, "beside": "capacity = factor(1.0, min = 16); group = batch"}
    in_training = [each for each in found(moe_text(**options)) if each.message.startswith("in training")]
    assert [each.code for each in in_training] == ["MOE0322"]
    assert not [each for each in found(moe_text(**options, microbatches=2)) if each.message.startswith("in training")]


def test_a_program_says_both_and_refuses_other_words() -> None:
    program = moe_plan(microbatches=2, recompute="layer").program
    text = print_program(program)
    assert parse_program(text) == program
    assert "\n  microbatches 2\n" in text
    for old, new in (
        ("microbatches 2", "microbatches 1"),
        ("microbatches 2", "microbatches -2"),
        ("microbatches 2", f"microbatches {2**31 + 1}"),
        ("recompute layer", "recompute none"),
        ("recompute layer", "recompute layers"),
    ):
        with pytest.raises(IrError):
            parse_program(text.replace(old, new, 1))


def test_the_summary_and_inspect_list_both(tmp_path: Path) -> None:
    plan = moe_plan(batch=16, microbatches=2, recompute="recompute = experts; layers 0 { recompute = layer }")
    text = summary(plan, plan.program, Path("p.plan"), 0.0)
    assert "in 2 micro-batches of 2 sequences per rank" in text
    assert "\n  recompute layer in layer 0\n            experts in layers 1..2\n" in text
    shown = inspected(plan.save(tmp_path / "p.plan"))
    assert "one rank's step of 2 micro-batches (kept for backward: of one of them)" in shown
    assert "layers[1..2], 2 layers, recomputes experts" in shown
    without = moe_plan()
    assert "micro-batch" not in summary(without, without.program, Path("p.plan"), 0.0)
    assert "recompute" not in summary(without, without.program, Path("p.plan"), 0.0)

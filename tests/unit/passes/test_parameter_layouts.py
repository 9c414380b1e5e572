"""Layouts of a parameter between its uses: their text, their rules, and that no job runs those of no stage of ZeRO."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.inspected_text import inspected
from support.plans import BODY, layer_plan, moe_plan
from support.tables import each_row
from support.wrong_plans import change_block, change_parameter

import moec
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.passes.cost.totals import tally
from moec.passes.ir import IrError, Layout
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.runtime.host.layer_home import make_layer
from moec.runtime.ranks.checks import Checks
from moec.runtime.verify.verification import verify
from moec.runtime.weights.rank import RankHome

SECONDS = 1.0
EXPERT = "moe.experts.up.weight"
NORM = "attention_norm.weight"


def plan_with(name: str, gradient: str, state: str, weight: str | None = None, **options: int) -> Plan:
    """A plan for 8 ranks (dp 4, tp 2; edp 4, ep 2), with other layouts for one parameter of the mixtures' layers."""
    plan = moe_plan(**{"ranks": 8, "tp": 2, "ep": 2, **options})
    layouts = {"gradient": Layout.parse(gradient), "optimizer_state": Layout.parse(state)}
    layouts |= {"weight": Layout.parse(weight)} if weight else {}
    # One by one, so that the gradient may be cut over one of them.
    sums = {"sum_over": ("dp", "tp")} if name == NORM and options.get("sequence_parallel", True) else {}
    return change_parameter(plan, BODY, name, **layouts, **sums)


FINER = {
    "state alone": (EXPERT, "ep:shard(0)", "edp:shard(2) ep:shard(0)", " optimizer(edp:shard(2) ep:shard(0))"),
    "gradient and state": (
        EXPERT,
        "ep:shard(0) edp:shard(0)",
        "ep:shard(0) edp:shard(0)",
        " gradient(ep:shard(0) edp:shard(0))",
    ),
    "state finer than gradient": (
        NORM,
        "dp:shard(0)",
        "dp:shard(0) tp:shard(0)",
        " gradient(dp:shard(0)) optimizer(dp:shard(0) tp:shard(0))",
    ),
}


@each_row("kind", FINER)
def test_finer_layouts_print_read_back_and_pass_every_check(kind: str):
    name, gradient, state, words = FINER[kind]
    program = plan_with(name, gradient, state).program
    text = print_program(program)
    assert text.count(words) == 1
    assert re.search(rf"@{re.escape(name)}: .* sum_over\([a-z, ]+\){re.escape(words)}( matrices.*)? at \d+\n", text)
    assert parse_program(text) == program
    check_program(program)


def test_a_placed_parameter_has_one_layout_four_times_and_its_text_says_it_once():
    program = moe_plan().program
    parameters = [p for block in program.blocks for p in block.parameters]
    assert any(p.layout.axes for p in parameters)
    assert all(p.layout == p.weight == p.gradient == p.optimizer_state for p in parameters)
    assert not re.search(r"weight\(|gradient\(|optimizer\(", print_program(program))


BROKEN = {
    "a gradient that is whole": (EXPERT, "replicate", "ep:shard(0)", "not ep:shard.0. cut further"),
    "a gradient cut before its weight": (EXPERT, "edp:shard(0) ep:shard(0)", "ep:shard(0)", "not ep:shard.0. cut"),
    "a gradient of another dim": (EXPERT, "ep:shard(1)", "ep:shard(0)", "is ep:shard.1., which is not"),
    "a gradient cut over an axis of other experts": (EXPERT, "ep:shard(0) dp:shard(2)", "ep:shard(0)", "over dp"),
    "a partial sum": (EXPERT, "ep:shard(0) edp:partial(sum)", "ep:shard(0)", "not ep:shard.0. cut"),
    "a state that is a partial sum": (EXPERT, "ep:shard(0)", "ep:shard(0) edp:partial(sum)", "optimizer state of"),
    "a state coarser than the gradient": (NORM, "dp:shard(0)", "replicate", "not dp:shard.0. cut further"),
    "a state cut before the gradient": (NORM, "dp:shard(0)", "tp:shard(0) dp:shard(0)", "not dp:shard.0. cut"),
    "a state of two meshes": (EXPERT, "ep:shard(0)", "ep:shard(0) dp:shard(2)", "two meshes"),
    "a state over a narrow axis": (NORM, "replicate", "cp:shard(0)", "axes are"),
    "a gradient over a narrow axis": (NORM, "cp:shard(0)", "replicate", "axes are"),
    "a dim that is not there": (NORM, "dp:shard(1)", "dp:shard(1)", "there is no dim 1"),
    "an uneven state": (EXPERT, "ep:shard(0)", "ep:shard(0) edp:shard(1)", "dim 1 of 2 is cut into 4 pieces"),
    "an uneven gradient": (EXPERT, "edp:shard(1) ep:shard(0)", "ep:shard(0)", "dim 1 of 2 is cut into 4 pieces"),
}


@each_row("fault", BROKEN)
def test_layouts_that_break_a_rule_are_refused(fault: str):
    name, gradient, state, words = BROKEN[fault]
    text = print_program(plan_with(name, gradient, state).program)
    started = time.perf_counter()
    with pytest.raises(InternalError, match=words):
        check_program(parse_program(text))
    assert time.perf_counter() - started < SECONDS


def test_a_gradient_is_cut_only_over_axes_that_it_is_summed_over():
    """Without sequence parallelism a norm's gradient is the same on the ranks of tp: there is no sum to scatter."""
    with pytest.raises(InternalError, match="cut over tp, over which it is not summed"):
        check_program(plan_with(NORM, "tp:shard(0)", "tp:shard(0)", sequence_parallel=False).program)
    check_program(plan_with(NORM, "replicate", "tp:shard(0)", sequence_parallel=False).program)


@each_row("missing", ["weight", "gradient", "optimizer_state"])
def test_a_placed_parameter_without_a_layout_of_each_kind_is_refused(missing: str):
    plan = moe_plan()
    parameters = plan.program.block(BODY).parameters
    wrong = change_block(plan, BODY, parameters=tuple(replace(p, **{missing: None}) for p in parameters))
    with pytest.raises(InternalError, match="has no layout for its"):
        check_program(wrong.program)


CUT = "ep:shard(0) edp:shard(0)"
STATED = f"sum_over(edp) weight({CUT}) gradient(ep:shard(0)) optimizer({CUT})"
HOSTILE = {
    "the layout before again": STATED.replace("gradient(ep:shard(0))", f"gradient({CUT})"),
    "the layout of its use again": STATED.replace(f"weight({CUT})", "weight(ep:shard(0))"),
    "state first": f"sum_over(edp) optimizer({CUT}) weight({CUT}) gradient(ep:shard(0))",
    "weight last": f"sum_over(edp) gradient(ep:shard(0)) optimizer({CUT}) weight({CUT})",
    "before the sums": f"weight({CUT}) sum_over(edp) gradient(ep:shard(0)) optimizer({CUT})",
    "twice": f"{STATED} optimizer({CUT})",
    "nothing": STATED.replace(f"optimizer({CUT})", "optimizer()"),
    "no layout": STATED.replace("edp:shard(0)", "edp:split(0)"),
    "an unknown axis": STATED.replace("edp:shard(0)", "zz:shard(0)"),
    "an axis twice": STATED.replace("edp:shard(0)", "ep:shard(1)"),
    "a dim of two digits": STATED.replace("edp:shard(0)", "edp:shard(10)"),
    "an unknown sum": STATED.replace("edp:shard(0)", "edp:partial(min)"),
    "code": STATED.replace("edp:shard(0)", '__import__("os")'),
    "a megabyte": STATED.replace("edp:shard(0)", " ".join(["edp:shard(0)"] * 80_000)),
    "half of a layout a million times": STATED.replace("edp:shard(0)", "edp:" * 250_000),
    "two spaces": STATED.replace(" optimizer", "  optimizer"),
    "another order of dims": STATED.replace("(ep:shard(0) edp:shard(0))", "(ep:shard(0) edp:shard(2))"),
    "no end": STATED.replace("ep:shard(0)) optimizer", "ep:shard(0) optimizer"),
}


@each_row("fault", HOSTILE)
def test_texts_that_no_pass_wrote_are_refused_with_their_line(fault: str):
    text = print_program(plan_with(EXPERT, "ep:shard(0)", CUT, weight=CUT).program)
    before, found, after = text.partition(STATED)
    assert found
    assert HOSTILE[fault] != STATED
    started = time.perf_counter()
    with pytest.raises(IrError) as refused:
        parse_program(before + HOSTILE[fault] + after)
    assert time.perf_counter() - started < SECONDS
    assert refused.value.line == before.count("\n") + 1
    assert len(str(refused.value)) < 400


# ---- what runs them ------------------------------------------------------------------------------------


def test_a_job_refuses_what_is_no_stage_of_zero_and_names_the_parameter(tmp_path: Path):
    for kind, said in (
        ("gradient and state", f"the optimizer state of layers.1.{EXPERT} is"),
        ("state finer than gradient", f"the compute layout of layers.1.{NORM} is"),
    ):
        name, gradient, state, _ = FINER[kind]
        plan = moec.load(plan_with(name, gradient, state).save(tmp_path / "finer.plan"))
        with pytest.raises(DiagnosticError, match=f"MOE0700.*{re.escape(said)}"):
            RankHome(plan, 0, "", {}, Checks("none", str), device="cpu", seed=0)  # type: ignore[arg-type]


def test_verify_knows_the_layouts_of_zero_and_no_others():
    assert verify(plan_with(*FINER["gradient and state"][:3]), float32=False).ok
    assert verify(plan_with(*FINER["state alone"][:3]), float32=False).ok
    with pytest.raises(DiagnosticError, match="MOE0700"):
        verify(plan_with(*FINER["state finer than gradient"][:3]))


def test_a_layer_refuses_them_too():
    plan = layer_plan(ranks=1)
    (block,) = (b for b in plan.program.blocks if b.parameters)
    for layout in ("ep:shard(0)", "edp:shard(0)"):
        finer = Layout.parse(layout)
        wrong = change_block(
            plan, block.name, parameters=tuple(replace(p, optimizer_state=finer) for p in block.parameters)
        )
        with pytest.raises(DiagnosticError, match=r"MOE0700.*optimizer state"):
            make_layer(wrong, None, "mean", seed=0, device=None)


def test_inspect_shows_layouts_that_are_not_the_weights(tmp_path: Path):
    plan = plan_with(NORM, "dp:shard(0)", "dp:shard(0) tp:shard(0)").save(tmp_path / "finer.plan")
    line = next(line for line in inspected(plan, 0).split(BODY)[1].splitlines() if NORM in line)
    assert line.endswith("of [16]  replicate  gradient dp:shard(0)  optimizer state dp:shard(0) tp:shard(0)")
    stored = moe_plan(zero=3).save(tmp_path / "stored.plan")
    text = inspected(stored, 0)
    assert "edp:shard(2) ep:shard(0)  in use ep:shard(0)\n" in text
    assert "gradient" not in text
    assert "in use" not in inspected(moe_plan().save(tmp_path / "whole.plan"), 0)


def test_bytes_of_a_rank_count_each_layout():
    whole, finer = moe_plan(ranks=8, tp=2, ep=2), plan_with(EXPERT, *["ep:shard(0) edp:shard(0)"] * 2)
    state = [tally(plan.program, plan.spec).state_bytes for plan in (whole, finer)]
    elements = 8 * 2 * 16 * 16 // 2
    # Master, gradient and two moments, in each of two layers, are a quarter.
    assert state[0] - state[1] == 2 * 4 * 4 * (elements - elements // 4)

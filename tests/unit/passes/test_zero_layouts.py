"""ZeRO as layouts: what each stage cuts, that blocks do not show it, and wrong layouts refused or found."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.combinations import diagonals
from support.plans import BODY, layer_text, moe_plan, moe_text
from support.tables import each_row
from support.verified import require_equal
from support.wrong_plans import change_parameter, change_sums

import moec
from moec.codegen.plan import Plan, PlanParameter
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.passes.ir import Layout, Shard, local_shape
from moec.passes.ir.verifier import check_program
from moec.runtime.verify.verification import verify
from moec.runtime.weights.shards import require_executable, require_gatherable

UP = "moe.experts.up.weight"
DEGREES: list[dict[str, Any]] = [
    {"ranks": 4, "ep": 2},
    {"ranks": 4, "ep": 1},
    {"ranks": 8, "ep": 2, "tp": 2},
    {"ranks": 4, "ep": 2, "dtype": "bf16"},
    {"ranks": 4, "ep": 2, "beside": "capacity = factor(1.25)"},
    {"ranks": 4, "ep": 2, "expert": "gelu(16, bias = true)", "model": "embedding = tokens(tied = true)"},
    {"ranks": 12, "ep": 2, "tp": 2, "batch": 12, "dim": 24, "mixtures": ((8, 2), (6, 3))},
]


def cut_axis(name: str) -> str:
    return "edp" if ".experts." in name else "dp"


def cuts(data: PlanParameter) -> tuple[bool, bool, bool]:
    """Whether weight, gradient and optimizer state are cut over the axis of data-parallel ranks."""
    layouts = (data.weight, data.gradient, data.optimizer_state)
    return tuple(isinstance(each.get(cut_axis(data.name)), Shard) for each in layouts)  # type: ignore[return-value]


@pytest.mark.parametrize(("zero", "degrees"), diagonals([3, 1, 2], DEGREES))
def test_each_stage_cuts_one_layout_more_and_the_plan_is_right(zero: int, degrees: dict[str, Any], tmp_path: Path):
    plan, whole = moe_plan(zero=zero, **degrees), moe_plan(**degrees)
    number_cut = 0
    for name, p in plan.parameters.items():
        other, mesh = whole.parameters[name], plan.meshes[p.mesh]
        ranks = mesh.size(cut_axis(name))
        master, before = (
            local_shape(each.shape, layout, mesh) for each, layout in ((p, p.master), (other, other.layout))
        )
        assert p.layout == other.layout
        if p.zero_cut is None:
            assert p.layout == p.weight == p.gradient == p.master
            continue
        number_cut += 1
        assert cuts(p) == ((False, False, True), (False, True, True), (True, True, True))[zero - 1]
        free = (d for d, n in enumerate(p.shape) if n % ranks == 0 and not other.layout.cuts(d))
        width = 2 if ".experts." in name and not name.endswith("down.bias") else None
        first = min(free, key=lambda d: (d > 0, d != width, d))
        assert p.zero_cut.dim == first
        assert [n // m for n, m in zip(before, master, strict=True)] == [
            ranks if d == first else 1 for d in range(len(p.shape))
        ]
    assert number_cut > 0.6 * len(plan.parameters)
    require_equal(plan)
    assert moec.load(plan.save(tmp_path / "p.plan")) == plan


@each_row("zero", [1, 2, 3])
def test_bodies_and_sums_of_gradients_are_those_without_zero(zero: int):
    tied: dict[str, Any] = {"ranks": 4, "ep": 2, "model": "embedding = tokens(tied = true)"}
    for block, other in zip(moe_plan(zero=zero, **tied).program.blocks, moe_plan(**tied).program.blocks, strict=True):
        assert block.ops == other.ops
        stored = [replace(p, weight=p.layout, gradient=p.layout, optimizer_state=p.layout) for p in block.parameters]
        assert tuple(stored) == other.parameters
        gathered = {p.gathered for p in block.parameters}
        assert gathered == ({"per use" if zero == 3 else "per step"} if block.parameters else set())


def test_a_dim_that_does_not_divide_is_passed_over_and_what_has_none_stays_whole():
    plan = moe_plan(zero=3, ranks=12, ep=2, dp=12, batch=24, dim=24, expert="swiglu(12)")
    layouts = {name: str(plan.parameters[f"layers.1.moe.experts.{name}.weight"].weight) for name in ("up", "down")}
    assert layouts == {"up": "edp:shard(2) ep:shard(0)", "down": "edp:shard(2) ep:shard(0)"}
    odd = moe_plan(zero=3, ranks=10, ep=2, dp=10, batch=10, expert="gelu(8)").parameters
    assert (str(odd[f"layers.1.{UP}"].weight), odd[f"layers.1.{UP}"].sum_over) == ("ep:shard(0)", ("edp[1..2]",))
    assert all(p.zero_cut is None for p in odd.values())


def test_kv_heads_that_tp_repeats_stay_whole():
    parameters = moe_plan(zero=3, ranks=8, tp=4, ep=2).parameters
    assert {name for name, p in parameters.items() if p.zero_cut is None} == {
        f"layers.{layer}.attention.{name}.weight" for layer in (1, 2) for name in "kv"
    }


@each_row("zero", [1, 2, 3])
def test_nothing_changes_where_there_are_no_replicas(zero: int):
    degrees: dict[str, Any] = {"ranks": 4, "tp": 4, "ep": 4}
    plan = replace(moe_plan(zero=zero, **degrees), moec="", spec_text="")
    assert plan == replace(moe_plan(**degrees), moec="", spec_text="")


@pytest.mark.parametrize("zero", [1, 3])
def test_toy_widths_keep_every_cut(zero: int):
    wide: dict[str, Any] = {"dim": 96, "expert": "swiglu(60)", "ffn": "gelu(90)", "ranks": 12, "batch": 12}
    report = require_equal(moe_plan(zero=zero, ep=2, tp=2, **wide), scale=True)
    assert report.widths


# ---- what is refused or found ------------------------------------------------------------------------


def with_layouts(plan: Plan, name: str, **layouts: str) -> Plan:
    return change_parameter(plan, BODY, name, **{kind: Layout.parse(text) for kind, text in layouts.items()})


USES: dict[str, tuple[dict[str, str], str]] = {
    "ZeRO's cut": ({"layout": "edp:shard(2) ep:shard(0)"}, "ops use @moe.experts.up.weight as edp"),
    "none of the weight's cuts": ({"layout": "replicate"}, "ops use @moe.experts.up.weight as replicate"),
    "another cut": ({"layout": "ep:shard(2)"}, "ops use @moe.experts.up.weight as ep"),
    "a cut that only the weight has not": ({"weight": "replicate", "gradient": "ep:shard(0)"}, "as ep:shard.0., which"),
    "a gradient cut less than the weight": ({"gradient": "ep:shard(0)"}, "not edp:shard.2. ep:shard.0. cut further"),
    "a gradient of another dim": ({"gradient": "edp:shard(1) ep:shard(0)"}, "not edp:shard.2. ep:shard.0. cut further"),
}


@each_row("fault", USES)
def test_a_use_that_the_stored_layouts_do_not_lead_to_is_refused_when_loaded(fault: str):
    layouts, words = USES[fault]
    with pytest.raises(InternalError, match=words):
        check_program(with_layouts(moe_plan(zero=3, ranks=4, ep=2), UP, **layouts).program)


@each_row("fault", ["none of the weight's cuts", "another cut", "a gradient of another dim"])
def test_such_a_use_is_refused_by_verify_and_by_a_job(fault: str):
    wrong = with_layouts(moe_plan(zero=3, ranks=4, ep=2), UP, **USES[fault][0])
    for run in (verify, require_runnable):
        with pytest.raises(DiagnosticError, match=rf"MOE0700.*{re.escape(UP)}"):
            run(wrong)


def test_verify_finds_a_use_of_parts_that_nothing_gathers():
    wrong = with_layouts(moe_plan(zero=3, ranks=4, ep=2), UP, layout="edp:shard(2) ep:shard(0)")
    require_executable(wrong.parameters)
    assert not verify(wrong, float32=False).ok


LAYOUTS: dict[str, tuple[str, dict[str, str], str]] = {
    "a gradient cut over an axis that is not summed": (
        "attention.q.weight", {"gradient": "tp:shard(0) ep:shard(1)", "optimizer_state": "tp:shard(0) ep:shard(1)"},
        "over which it is not summed",
    ),
    "a master cut where its gradient is not": (
        "attention.q.weight", {"gradient": "dp:shard(1) tp:shard(0)", "optimizer_state": "dp:shard(2) tp:shard(0)"},
        "not dp:shard.1. tp:shard.0. cut further",
    ),
    "a master that loses the weight's cut": (UP, {"optimizer_state": "edp:shard(2)"}, "not ep:shard.0. cut further"),
    "swapped dims": (UP, {"optimizer_state": "edp:shard(0) ep:shard(2)"}, "not ep:shard.0. cut further"),
}  # fmt: skip


@each_row("fault", LAYOUTS)
def test_layouts_between_steps_that_no_conversion_undoes_are_refused(fault: str):
    name, layouts, words = LAYOUTS[fault]
    right = moe_plan(zero=1, ranks=8, tp=2, ep=2)
    check_program(right.program)
    with pytest.raises(InternalError, match=words):
        check_program(with_layouts(right, name, **layouts).program)


@each_row("zero", [1, 2, 3])
def test_sums_that_zero_needs_are_found_missing(zero: int):
    """A gradient that nobody sums over dp, cut over dp: the conversions keep each rank's own term."""
    right = moe_plan(zero=zero, ranks=4, ep=2)
    require_runnable(right)
    for name in ("attention.q.weight", "experts.up.weight"):
        wrong = change_sums(right, name, ())
        with pytest.raises(InternalError, match="not summed" if zero > 1 else "is summed over set"):
            check_program(wrong.program)
        with pytest.raises(DiagnosticError, match="MOE0700"):
            require_runnable(wrong)
        assert not verify(wrong, float32=False).ok


UNRUN = {
    "two axes": ("attention.q.weight", {"optimizer_state": "dp:shard(1) tp:shard(0)", "weight": "replicate"}),
    "a dim cut twice": (UP, {"optimizer_state": "ep:shard(0) edp:shard(0)"}),
    "a weight cut otherwise": (UP, {"weight": "replicate"}),
}


@each_row("fault", UNRUN)
def test_layouts_of_no_stage_are_refused_before_a_job(fault: str):
    plan, (name, layouts) = moe_plan(zero=1, ranks=8, tp=2, ep=2), UNRUN[fault]
    wrong = with_layouts(plan, name, **layouts)
    with pytest.raises(DiagnosticError, match=rf"MOE0700.*{re.escape(name)}"):
        require_runnable(wrong)


def require_runnable(plan: Plan) -> None:
    require_executable(plan.parameters)
    require_gatherable(plan.parameters)


# ---- the words of a file -------------------------------------------------------------------------------


def test_offload_changes_nothing_on_cpus_and_is_refused_on_accelerators():
    with_offload = moe_text(zero=1).replace("zero = 1", "zero = 1; offload = optimizer")
    assert moec.compile(with_offload).parameters == moe_plan(zero=1).parameters
    on_cuda = with_offload.replace("device = cpu", "device = h100")
    with pytest.raises(DiagnosticError, match=r"MOE0202.*`offload = optimizer` on cuda devices"):
        moec.compile(on_cuda)


def test_the_file_of_a_layer_has_no_zero():
    with pytest.raises(DiagnosticError, match="MOE0326"):
        moec.compile(layer_text(tail="parallel { ep = 2; zero = 2 }\n"))

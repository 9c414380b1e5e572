"""ZeRO as layouts: what each stage cuts, the gathers of stage 3, and wrong ones refused or found."""

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
from support.wrong_plans import bypass, change_block, change_kind, change_sums

import moec
from moec.codegen.plan import Plan, PlanParameter
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.passes.ir import Layout, Shard, local_shape
from moec.passes.ir.ops import AllGather, AllGatherAlike
from moec.passes.ir.verifier import check_program
from moec.runtime.verify.verification import verify
from moec.runtime.weights.shards import require_executable, require_gathered

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
    layouts = (data.layout, data.gradient, data.optimizer_state)
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
        if p.zero_cut is None:
            assert (p.layout, p.gradient, p.master) == (other.layout, other.gradient, other.master)
            continue
        number_cut += 1
        assert cuts(p) == ((False, False, True), (False, True, True), (True, True, True))[zero - 1]
        first = next(d for d, n in enumerate(p.shape) if n % ranks == 0 and not other.layout.cuts(d))
        assert p.zero_cut.dim == first
        assert [n // m for n, m in zip(before, master, strict=True)] == [
            ranks if d == first else 1 for d in range(len(p.shape))
        ]
    assert number_cut > 0.6 * len(plan.parameters)
    require_equal(plan)
    assert moec.load(plan.save(tmp_path / "p.plan")) == plan


def test_one_gather_serves_each_use_of_a_parameter_and_its_backward_sums():
    tied = moe_plan(zero=3, ranks=4, ep=2, model="embedding = tokens(tied = true)")
    for block in tied.program.blocks:
        gathers = [op for op in block.ops if isinstance(op, AllGather) and op.operands[0].startswith("@")]
        names = [op.operands[0][1:] for op in gathers]
        assert sorted(names) == sorted(p.name for p in block.parameters)
        assert all(p.sum_over == () for p in block.parameters)


def test_a_dim_that_does_not_divide_is_passed_over_and_what_has_none_stays_whole():
    plan = moe_plan(zero=3, ranks=12, ep=2, dp=12, batch=24, dim=24, expert="swiglu(12)")
    layouts = {name: str(plan.parameters[f"layers.1.moe.experts.{name}.weight"].layout) for name in ("up", "down")}
    assert layouts == {"up": "edp:shard(2) ep:shard(0)", "down": "edp:shard(1) ep:shard(0)"}
    odd = moe_plan(zero=3, ranks=10, ep=2, dp=10, batch=10, expert="gelu(8)").parameters
    assert (str(odd[f"layers.1.{UP}"].layout), odd[f"layers.1.{UP}"].sum_over) == ("ep:shard(0)", ("edp[1..2]",))
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


FAULTS = {
    "a gather whose backward slices": lambda p: change_kind(p, BODY, "up_weight", AllGatherAlike, axis="edp", dim=1),
    "a gather of another dim": lambda p: change_kind(p, BODY, "up_weight", AllGather, axis="edp", dim=2),
    "a sum beside the scatter": lambda p: change_sums(p, "experts.up.weight", ("edp",)),
}


def test_a_weight_that_its_block_does_not_gather_is_refused_before_a_job():
    plan = moe_plan(zero=3, ranks=4, ep=2)
    require_gathered(plan)
    with pytest.raises(DiagnosticError, match=r"MOE0700.*layers\[1\.\.2\] uses @moe.experts.up.weight"):
        require_gathered(bypass(plan, BODY, "up_weight"))


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_gathers_are_refused_by_rule_and_found_by_verify(fault: str):
    wrong = FAULTS[fault](moe_plan(zero=3, ranks=4, ep=2))
    with pytest.raises(InternalError):
        check_program(wrong.program)
    report = verify(wrong, float32=False)
    assert not report.ok


def with_layouts(plan: Plan, name: str, **layouts: str) -> Plan:
    changed = {kind: Layout.parse(text) for kind, text in layouts.items()}
    parameters = plan.program.block(BODY).parameters
    return change_block(
        plan, BODY, parameters=tuple(replace(p, **changed) if p.name == name else p for p in parameters)
    )


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


def test_sums_that_zero_needs_are_found_missing():
    """A gradient that nobody sums over dp, cut over dp: the conversions keep each rank's own term."""
    right = moe_plan(zero=1, ranks=4, ep=2)
    require_gathered(right)
    with pytest.raises(DiagnosticError, match="MOE0700"):
        require_gathered(change_sums(right, "attention.q.weight", ()))
    assert not verify(change_sums(right, "attention.q.weight", ()), float32=False).ok
    assert not verify(change_sums(right, "experts.up.weight", ()), float32=False).ok


UNRUN = {
    "two axes": ("attention.q.weight", {"optimizer_state": "dp:shard(1) tp:shard(0)", "layout": "replicate"}),
    "a dim cut twice": (UP, {"optimizer_state": "ep:shard(0) edp:shard(0)"}),
    "a weight cut otherwise": (UP, {"layout": "replicate"}),
}


@each_row("fault", UNRUN)
def test_layouts_of_no_stage_are_refused_before_a_job(fault: str):
    plan, (name, layouts) = moe_plan(zero=1, ranks=8, tp=2, ep=2), UNRUN[fault]
    wrong = with_layouts(plan, name, **layouts)
    with pytest.raises(DiagnosticError, match=rf"MOE0700.*{re.escape(name)}"):
        require_runnable(wrong)


def require_runnable(plan: Plan) -> None:
    require_executable(plan.parameters)
    require_gathered(plan)


# ---- the words of a file -------------------------------------------------------------------------------


def test_offload_changes_nothing_on_cpus_and_is_refused_on_accelerators():
    with_offload = moe_text(zero=1).replace("zero = 1", "zero = 1; offload = optimizer")
    assert moec.compile(with_offload).parameters == moe_plan(zero=1).parameters
    on_cuda = with_offload.replace("device = cpu", "device = h100")
    with pytest.raises(DiagnosticError, match=r"MOE0202.*`offload = optimizer` on cuda devices"):
        moec.compile(on_cuda)


def test_auto_is_not_compiled_yet():
    with pytest.raises(DiagnosticError, match=r"MOE0202.*`zero = auto`"):
        moec.compile(moe_text(zero=1).replace("zero = 1", "zero = auto"))


def test_the_file_of_a_layer_has_no_zero():
    with pytest.raises(DiagnosticError, match="MOE0326"):
        moec.compile(layer_text(tail="parallel { ep = 2; zero = 2 }\n"))

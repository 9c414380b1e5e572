"""moec verify runs two layers of each kind: what is wrong in any of the others is found all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.plans import moe_plan
from support.tables import each_row
from support.verified import require_equal
from support.wrong_plans import bypass, change_block, change_op, change_parameter, change_result, with_program

from moec.codegen.plan import Plan
from moec.passes.pipeline import compile_program
from moec.runtime.verify.repeats import without_repeats
from moec.runtime.verify.verification import verify

BODY = "layers[1..60]"


def deep(*, depth: int = 61, **options: object) -> Plan:
    return moe_plan(**{"ranks": 2, "ep": 2, "dim": 8, "expert": "swiglu(8)", "batch": 2, **options, "depth": depth})


def kept(plan: Plan) -> list[int]:
    return list(without_repeats(plan, compile_program(plan.spec).program).layers)


@each_row(
    ("options", "layers"),
    [
        ({}, [0, 1, 2]),
        ({"tp": 2, "ep": 1, "zero": 3, "microbatches": 2, "dtype": "bf16"}, [0, 1, 2]),
        ({"gate": "topk(2, bias = online(1e-3))"}, [0, 1, 2]),
        ({"recompute": "layers 4..6 { recompute = layer }"}, [0, 1, 2, 4, 5]),
        ({"recompute": "layers 3..6 { ep = 1 }"}, [0, 1, 2, 3, 4]),
        ({"model": "layers 3..60 step 3 { attention = mha(heads = 2, window = 4) }"}, [0, 1, 2, 3, 6]),
    ],
)
def test_two_layers_of_each_kind_are_run(options: dict[str, object], layers: list[int]):
    plan = deep(**options)
    assert kept(plan) == layers
    report = require_equal(plan)
    assert report.repeats == 61 - len(layers)
    assert not report.scaled


@each_row(
    ("words", "layers"),
    [
        ("pp = 2; stages = [0..7, 8..60]", [0, 1, 2, 8]),
        (
            "pp = 2; schedule = zero_bubble_v; stages = [0..14, 15..29, 30..45, 46..60]\n  layers 20..60 { ep = 1 }",
            [0, 1, 2, 15, 20, 21, 30, 46],
        ),
    ],
)
def test_further_stages_run_one_of_each_kind(words: str, layers: list[int]):
    plan = deep(ranks=4, batch=4, recompute=f"microbatches = 2; {words}\n  layers {{ recompute = none }}")
    assert kept(plan) == layers
    assert require_equal(plan).repeats == 61 - len(layers)


def test_at_toy_widths_too():
    report = require_equal(deep(depth=12), scale=True)
    assert (report.scaled, report.repeats) == (True, 9)


@each_row("depth", [1, 2, 3])
def test_a_plan_without_repeated_layers_is_run_as_it_is(depth: int):
    plan = deep(depth=depth) if depth > 1 else moe_plan(depth=2)
    assert without_repeats(plan, plan.program).plan is plan


# ---- faults of one layer -----------------------------------------------------------------------------


def apart(plan: Plan, layer: int, change: Callable[[Plan, str], Plan]) -> Plan:
    """The plan in which this layer has a body of its own, which `change` changes."""
    name = f"layers[{layer}]"
    own = replace(plan.program.block(BODY), name=name)
    forward = plan.program.block("forward")
    calls = tuple(replace(op, block=name) if getattr(op, "layer", None) == layer else op for op in forward.ops)
    others = (replace(forward, ops=calls) if block is forward else block for block in plan.program.blocks)
    layers = tuple(replace(one, bodies=(name,)) if one.number == layer else one for one in plan.program.layers)
    return change(with_program(plan, replace(plan.program, blocks=(own, *others), layers=layers)), name)


WINDOW = "gqa(heads = 4, kv_heads = 2, window = 200, rope = rope())"


@pytest.mark.parametrize(
    ("change", "options", "value", "unlike"),
    [
        (lambda p, block: change_op(p, block, "attended", window=300), {"attention": WINDOW}, "attended", True),
        (lambda p, block: bypass(p, block, "k.1"), {}, "attended", False),
    ],
)
def test_a_changed_op_of_one_of_sixty_equal_layers_is_found(change, options, value: str, unlike: bool):
    plan = deep(sequence=256 if options else 8, **options)
    report = verify(apart(plan, 37, change), float32=False)
    found = report.first_difference
    assert not report.ok
    assert (found.layer, found.value, found.unlike) == ("layers[37]" if unlike else "layers.37", value, unlike)


def without_a_term(plan: Plan) -> Plan:
    """The balance terms are added without that of layer 9."""
    (total,) = (op for op in plan.program.block("forward").ops if "balance_9" in op.operands)
    left = tuple(name for name in total.operands if name != "balance_9")
    return change_op(plan, "forward", total.results[0].name, operands=left)


def other_counts(plan: Plan) -> Plan:
    outputs = plan.program.block("forward").outputs
    given = (replace(o, name="counts_8") if o.name == "counts_9" else o for o in outputs)
    return change_block(plan, "forward", outputs=tuple(given))


@each_row(
    "change",
    [
        lambda p: change_op(change_op(p, "forward", "x.9", layer=9), "forward", "x.10", layer=8),
        lambda p: change_op(p, "forward", "x.10", operands=("x.8",)),
        without_a_term,
        other_counts,
    ],
)
def test_a_wrong_place_of_a_layer_that_repeats_others_is_found(change: Callable[[Plan], Plan]):
    report = verify(change(deep(depth=12)), float32=False)
    assert not report.ok
    assert report.repeats == 0


# ---- faults of all layers of a kind ------------------------------------------------------------------


@each_row(
    ("change", "value"),
    [
        (lambda p: bypass(p, "layers[5..60]", "k.1"), "attended"),
        (
            lambda p: change_parameter(p, "layers[5..60]", "moe.experts.up.weight", sum_over=()),
            "@moe.experts.up.weight",
        ),
    ],
)
def test_a_layer_is_named_by_its_number_in_the_whole_plan(change: Callable[[Plan], Plan], value: str):
    report = verify(change(deep(ranks=4, batch=4, recompute="layers 1..4 { recompute = layer }")))
    assert not report.ok
    assert report.repeats == 56
    assert (report.first_difference.layer, report.first_difference.value) == ("layers.5", value)
    if value[0] == "@":
        assert re.search(r"layers\.[56]\.moe\.experts\.up\.weight", report.worst)


def test_a_width_that_somebody_changed_is_found_in_a_deep_plan():
    report = verify(change_result(deep(), BODY, "h", shape=("batch", "sequence", 9)), scale=True)
    assert not report.ok
    assert report.first_difference.layer == BODY


@pytest.mark.parametrize("axis", ["ep", "edp"])
def test_groups_of_other_ranks_are_found(axis: str):
    plan = deep(depth=9, ranks=4, batch=4)
    name = f"{axis}[1..8]"
    wrong = replace(plan, groups={**plan.groups, name: tuple((a, 3 - b) for a, b in ((0, 1), (2, 3)))})
    assert wrong.groups != plan.groups
    assert not verify(wrong, float32=False).ok

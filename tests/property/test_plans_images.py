"""Random models of images on random clusters: every plan equals the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.combinations import diagonals
from support.examples import examples
from support.image_plans import image_plan
from support.verified import require_equal

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program

ATTENTIONS = {
    "windows of a grid": [
        "mha(heads = 4, causal = false, grid = windows(2))",
        "gqa(heads = 4, kv_heads = 2, causal = false, grid = windows(2, shift = 1))",
    ],
    "whole images": ["mha(heads = 4, causal = false)", "gqa(heads = 4, kv_heads = 2, rope = rope(), causal = false)"],
}

CLASS_TOKEN: dict[str, Any] = {"image": 6, "pool": "first"}
"""3 x 3 patches and a class token, whose length 2 divides and 4 does not, as with any grid."""


@st.composite
def plans(draw: st.DrawFn, attentions: list[str], ranks: int, **options: Any) -> Plan:
    degrees = [degree for degree in (1, 2, 4) if ranks % degree == 0]
    tp, microbatches = draw(st.sampled_from(degrees[:2] if options else degrees)), draw(st.sampled_from([1, 1, 2]))
    capacities = ["", "capacity = factor(1.0); group = batch", "capacity = factor(0.75)", "group = rank"]
    return image_plan(
        ranks=ranks,
        tp=tp,
        ep=draw(st.sampled_from(degrees)),
        zero=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        microbatches=microbatches,
        recompute=draw(st.sampled_from(["none", "experts", "layer"])),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        model=draw(
            st.sampled_from(["", "norm = layer_norm()", "norm_place = res_post", "parallel_residual = one_norm"])
        ),
        patches=draw(st.sampled_from(["", ", positions = none"])),
        attention=draw(st.sampled_from(attentions)),
        second=draw(st.sampled_from(attentions)),
        gate=draw(st.sampled_from(["topk(2)", "topk(1, jitter = 0.2)", "topk(2, bias = online(0.01))"])),
        balance=draw(st.sampled_from(["[]", "[switch_loss(0.1)]", "[switch_loss(0.1), z_loss(0.01)]"])),
        beside=draw(st.sampled_from(capacities)),
        batch=ranks * microbatches * draw(st.integers(1, 2)),
        **options,
    )


@examples(4, 75)
@given(st.data())
def test_every_plan_equals_the_unsharded_model(data: st.DataObject) -> None:
    word, ranks = data.draw(st.sampled_from([*ATTENTIONS, "class token"])), data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    if word == "class token":
        plan = data.draw(plans(ATTENTIONS["whole images"], ranks, **CLASS_TOKEN))
    else:
        plan = data.draw(plans(ATTENTIONS[word], ranks))
    require_equal(plan, float32=False)


@pytest.mark.parametrize(("word", "sequence_parallel"), diagonals([*ATTENTIONS, "class token"], [True, False]))
def test_plans_with_tp_and_ep_equal_the_unsharded_model(word: str, sequence_parallel: bool) -> None:
    if word == "class token":
        options: dict[str, Any] = {"ranks": 4, "zero": 3, **CLASS_TOKEN}
    else:
        options = {"ranks": 8, "zero": 1, **dict(zip(("attention", "second"), ATTENTIONS[word], strict=True))}
    plan = image_plan(tp=2, ep=4, batch=16, sequence_parallel=sequence_parallel, microbatches=2, **options)
    require_equal(plan)
    assert parse_program(print_program(plan.program)) == plan.program


def test_a_plan_at_toy_widths_keeps_its_images() -> None:
    require_equal(image_plan(ranks=4, tp=2, ep=2), scale=True)


def test_compiling_again_gives_the_same_plan() -> None:
    plan = image_plan(ranks=4, tp=2, ep=2)
    assert compile_source(plan.spec).program == plan.program

"""Random models of images on random clusters: every plan equals the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.image_plans import image_plan

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.passes.ir.parse import parse_program
from moec.passes.ir.text import print_program
from moec.runtime.verify.verification import verify

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


@pytest.mark.parametrize("word", ATTENTIONS)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_plan_equals_the_unsharded_model(word: str, data: st.DataObject) -> None:
    plan = data.draw(plans(ATTENTIONS[word], data.draw(st.sampled_from([1, 2, 4, 8]))))
    report = verify(plan, float32=False)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("word", ATTENTIONS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_many_plans_equal_the_unsharded_model(word: str, data: st.DataObject) -> None:
    plan = data.draw(plans(ATTENTIONS[word], data.draw(st.sampled_from([1, 2, 4, 8, 16]))))
    report = verify(plan, float32=False)
    assert report.ok, report


@pytest.mark.parametrize("word", ATTENTIONS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_plans_with_tp_and_ep_equal_the_unsharded_model(word: str, sequence_parallel: bool) -> None:
    first, second = ATTENTIONS[word]
    options = {"attention": first, "second": second, "sequence_parallel": sequence_parallel, "microbatches": 2}
    plan = image_plan(ranks=8, tp=2, ep=4, zero=1, batch=16, **options)
    report = verify(plan)
    assert report.ok, report
    assert parse_program(print_program(plan.program)) == plan.program


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_plan_with_a_class_token_equals_the_unsharded_model(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 4, 8]))
    report = verify(data.draw(plans(ATTENTIONS["whole images"], ranks, **CLASS_TOKEN)), float32=False)
    assert report.ok, report


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_many_plans_with_a_class_token_equal_the_unsharded_model(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    report = verify(data.draw(plans(ATTENTIONS["whole images"], ranks, **CLASS_TOKEN)), float32=False)
    assert report.ok, report


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_class_token_with_tp_and_ep_equals_the_unsharded_model(sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel, "microbatches": 2, **CLASS_TOKEN}
    plan = image_plan(ranks=4, tp=2, ep=4, zero=3, batch=8, **options)
    report = verify(plan)
    assert report.ok, report
    assert parse_program(print_program(plan.program)) == plan.program


def test_a_plan_at_toy_widths_keeps_its_images() -> None:
    report = verify(image_plan(ranks=4, tp=2, ep=2), scale=True)
    assert report.ok, report


def test_compiling_again_gives_the_same_plan() -> None:
    plan = image_plan(ranks=4, tp=2, ep=2)
    assert compile_source(plan.spec).program == plan.program

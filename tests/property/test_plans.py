"""Random models on random clusters: every plan that compiles equals the unsharded model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from random_specs import specs
from support.examples import examples
from support.verified import require_equal

from moec.codegen.folder import plan_files
from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.pipeline import compile_program
from moec.runtime.host.reference import reference
from moec.runtime.verify.blame import first_difference
from moec.runtime.verify.inputs import global_batch
from moec.runtime.verify.unsharded import outcome


@examples(20, 1000)
@given(specs(max_ranks=8, max_layers=3))
def test_every_plan_equals_the_unsharded_model(spec: Spec):
    require_equal(spec, float32=False)


@examples(6, 1000)
@given(specs(max_ranks=64))
def test_every_plan_of_many_ranks_equals_the_unsharded_model(spec: Spec):
    require_equal(spec, float32=False)


@examples(3, 50)
@given(specs())
def test_every_plan_equals_the_unsharded_model_at_toy_widths(spec: Spec):
    require_equal(spec, scale=True)


@examples(3, 50)
@given(specs(max_ranks=8))
def test_nothing_is_blamed_in_a_right_plan(spec: Spec):
    plan = compile_source(spec)
    model = reference(spec, dtype=torch.float64)
    inputs = global_batch(plan, seed=0)
    outcome(model, inputs).differentiated.backward()
    assert first_difference(plan, model, inputs) is None


@examples(10, 200)
@given(specs(max_ranks=64))
def test_text_and_bytes_are_functions_of_the_spec(spec: Spec):
    program = compile_program(spec).program
    read = parse_program(print_program(program))
    assert read == program
    check_program(read)
    assert plan_files(compile_source(spec)) == plan_files(compile_source(spec))


@pytest.mark.slow
@examples(50, 50)
@given(specs(max_ranks=8))
def test_every_plan_gives_the_same_on_torchs_own_ranks(spec: Spec):
    pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode")
    from support.torch_ranks import distance, run_both, unsharded

    plan = compile_source(spec)
    for training in (True, False):
        if training or plan.program.settings:
            torchs, virtual = run_both(plan, training=training)
            assert distance(torchs, virtual) < 1e-11
            assert distance(torchs, unsharded(plan, training=training)) < 1e-11

"""Random pipelines: every plan that compiles equals the unsharded model, by each schedule."""

from __future__ import annotations

from hypothesis import given
from random_pipelines import pipelines
from support.examples import examples
from support.verified import require_equal

from moec.codegen.plan import Plan
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program


@examples(12, 1000)
@given(pipelines())
def test_every_pipeline_equals_the_unsharded_model(plan: Plan):
    program = parse_program(print_program(plan.program))
    assert program == plan.program
    check_program(program)
    require_equal(plan, float32=False)

"""Random pipelines: every plan that compiles equals the unsharded model, by each schedule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from random_specs import specs
from support.examples import examples
from support.staged_plans import staged_plan
from support.verified import require_equal

from moec.codegen.plan import Plan
from moec.passes.degrees.schedules import Pipeline, takes
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.place.pipeline_tables import TABLES

PIPELINES = [
    (word, Pipeline(ranks, virtual, microbatches))
    for word in TABLES
    for ranks, virtual in ((2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 2), (4, 2), (2, 3))
    for microbatches in (1, 2, 3, 4, 6, 8)
    if takes(word, Pipeline(ranks, virtual, microbatches))
]


@st.composite
def pipelines(draw: st.DrawFn) -> Plan:
    """A pipeline of 2 to 8 ranks of stages; each stage has 1 to 8 ranks."""
    word, pipeline = draw(st.sampled_from(PIPELINES))
    stages = pipeline.ranks * pipeline.virtual
    spec = draw(specs(max_ranks=8, parts=(pipeline.microbatches,), depths=(stages, stages + 1, stages + 3)))
    return staged_plan(spec, pipeline.ranks, pipeline.virtual, word)


@examples(12, 1000)
@given(pipelines())
def test_every_pipeline_equals_the_unsharded_model(plan: Plan):
    program = parse_program(print_program(plan.program))
    assert program == plan.program
    check_program(program)
    require_equal(plan, float32=False)

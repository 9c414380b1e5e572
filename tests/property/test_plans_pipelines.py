"""Random pipelines: every plan that compiles equals the unsharded model, by each schedule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from random_specs import specs
from support.examples import examples
from support.staged_plans import staged_plan
from support.verified import require_equal

from moec.codegen.plan import Plan
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.place.pipeline_tables import Pipeline, takes

SCHEDULES = {
    "gpipe": (1,), "one_f_one_b": (1,), "interleaved": (2, 3), "looped_bfs": (1, 2, 3), "zero_bubble": (1, 2),
    "zero_bubble_v": (2,), "dual_pipe_v": (2,),
}  # fmt: skip
"""How many stages of each rank are drawn."""

STAGES = specs(max_ranks=8, parts=(None, 2, 3, 4, 6, 8), depths=range(2, 9))
"""Models, on the ranks of one stage."""


@st.composite
def pipelines(draw: st.DrawFn) -> Plan:
    """A pipeline of 2 to 8 ranks of stages."""
    spec = draw(STAGES)
    layers, microbatches = spec.model.depth, choose_degrees(spec).microbatches
    words = [
        (word, virtual, pp)
        for word, numbers in SCHEDULES.items()
        for virtual in numbers
        for pp in (2, 3, 4, 6, 8)
        if pp * virtual <= layers and takes(word, Pipeline(pp, virtual, microbatches))
    ]
    schedule, virtual, pp = draw(st.sampled_from(words))
    return staged_plan(spec, pp, virtual, schedule)


@examples(12, 1000)
@given(pipelines())
def test_every_pipeline_equals_the_unsharded_model(plan: Plan):
    program = parse_program(print_program(plan.program))
    assert program == plan.program
    check_program(program)
    require_equal(plan, float32=False)

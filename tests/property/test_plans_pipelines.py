"""Random pipelines: every plan that compiles equals the unsharded model, by each schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import pipelines
from support.examples import examples
from support.verified import require_equal
from test_plans_token_inputs import GATES, replaying

from moec.codegen.plan import Plan
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.place.pipeline_tables import TABLES

UNPACKED = ["", "embedding = tokens(padding = 0)", "embedding = tokens(padding = given)"]
OVER_MODEL = ["[switch_loss(0.1, over = model)]", "[switch_loss(0.1, over = model), z_loss(0.01)]", "[]"]


@pytest.mark.parametrize("word", TABLES)
@examples(4, 150)
@given(data=st.data())
def test_every_pipeline_equals_the_unsharded_model(word: str, data: st.DataObject):
    plan = data.draw(pipelines(words=[word]))
    program = parse_program(print_program(plan.program))
    assert program == plan.program
    check_program(program)
    require_equal(plan, float32=False)


@examples(2, 100)
@given(pipelines(change=replaying, max_layers=1, gates=GATES, models=UNPACKED, balances=OVER_MODEL))
def test_every_pipeline_that_replays_routes_equals_the_unsharded_model(plan: Plan):
    require_equal(plan, float32=False)

"""A strategy of random pipelines: a schedule, and a random model whose layers its stages divide."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from property.random_specs import specs
from support.session import extent
from support.staged_plans import staged_plan

from moec.codegen.plan import Plan
from moec.grammar.spec import Spec
from moec.passes.degrees.schedules import Pipeline, takes
from moec.passes.place.pipeline_tables import TABLES

PIPELINES = [
    (word, Pipeline(ranks, virtual, microbatches))
    for word in TABLES
    for ranks, virtual in ((2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 2), (4, 2), (2, 3))
    for microbatches in (1, 2, 3, 4, 6, 8)
    if takes(word, Pipeline(ranks, virtual, microbatches))
]

PASSES = 24
"""In `make test`, the most ranks of a stage × stages × micro-batches; a stage always has one rank at least."""


@st.composite
def pipelines(
    draw: st.DrawFn,
    max_ranks: int = 8,
    words: Collection[str] = TABLES,
    change: Callable[[Spec], Spec] = lambda spec: spec,
    **options: Any,
) -> Plan:
    """A pipeline of 2 to 8 ranks of stages; each stage has 1 to `max_ranks` ranks. `options`: those of `specs`.

    In `make test` a stage has fewer ranks where there are many stages and micro-batches: it has time for many small
    pipelines, or for few large ones.
    """
    word, pipeline = draw(st.sampled_from([(word, pipeline) for word, pipeline in PIPELINES if word in words]))
    stages = pipeline.ranks * pipeline.virtual
    if not extent.everything:
        max_ranks = max(1, min(max_ranks, PASSES // (stages * pipeline.microbatches)))
    depths = stages, stages + 1, stages + 3
    spec = draw(specs(max_ranks=max_ranks, parts=(pipeline.microbatches,), depths=depths, **options))
    assume(spec.model.depth >= stages)  # layers with degrees of their own may be fewer
    return staged_plan(change(spec), pipeline.ranks, pipeline.virtual, word)

"""Random files: the estimates of a search are the predictions of the plans that are compiled for it."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from random_specs import specs
from support.examples import examples

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Parallel, Spec
from moec.grammar.stated import OPEN_WORDS
from moec.passes.cost.prediction import predict
from moec.passes.cost.rates import ClusterRates
from moec.passes.lower.lower_model import lower
from moec.passes.pipeline import compile_program
from moec.passes.search.estimates import estimates
from moec.passes.search.fronts import rows_of
from moec.passes.search.ranking import words_of
from moec.passes.search.rules import require_choosable, with_first_values
from moec.passes.search.space import Space
from moec.passes.search.tables import Table


@examples(4, 200)
@given(specs(max_ranks=8))
def test_without_a_pipeline_estimated_seconds_are_exact(spec: Spec):
    """Of some plans with any stage of ZeRO and recomputation."""
    spec = spec.replace(parallel=Parallel(**dict.fromkeys(OPEN_WORDS, "auto") | {"pp": 1}))
    try:
        require_choosable(spec)
    except DiagnosticError:
        assume(condition=False)
    space, rates, lowered, chosen = (
        Space(spec),
        ClusterRates(spec.cluster),
        lower(with_first_values(spec)),
        random.Random(0),
    )
    every = list(estimates(Table.of(space, lowered, rows_of(space, lowered, rates)), rates))
    for each in chosen.choices(every, k=8):
        number = chosen.randrange(len(each.seconds))
        words = words_of(each, number)
        stated = spec.replace(parallel=Parallel(**words))
        step = predict(compile_program(stated, "schedule").program, stated).step
        assert each.seconds[number] == pytest.approx(step.total, rel=1e-9), words

"""Spec(to_text(spec)) == spec for random Specs over the whole vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from vocabulary import specs

from moec.grammar import Spec, check, load_text, to_text
from moec.grammar.diagnostics import Severity

slow_ones = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(max_examples=20, deadline=None, suppress_health_check=slow_ones)
@given(spec=specs())
def test_a_spec_reads_back_from_its_text(spec: Spec) -> None:
    assert_reads_back(spec)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=slow_ones)
@given(spec=specs())
def test_a_spec_reads_back_from_its_text_at_length(spec: Spec) -> None:
    assert_reads_back(spec)


def assert_reads_back(spec: Spec) -> None:
    assert [found for found in check(spec) if found.severity is Severity.ERROR] == []
    text = to_text(spec)
    loaded = load_text(text)
    assert [found for found in loaded.diagnostics if found.severity is Severity.ERROR] == []
    assert loaded.spec == spec
    assert to_text(loaded.spec) == text
    if spec.has_model:
        assert len({id(layer) for layer in loaded.spec.model.layers}) == len(set(spec.model.layers))

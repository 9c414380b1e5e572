"""Spec(to_text(spec)) == spec for random Specs over the whole vocabulary."""

from __future__ import annotations

from hypothesis import given
from support.examples import examples
from vocabulary import specs

from moec.grammar import Spec, check, load_text, to_text
from moec.grammar.diagnostics import Severity


@examples(6, 200)
@given(spec=specs())
def test_a_spec_reads_back_from_its_text(spec: Spec) -> None:
    assert [found for found in check(spec) if found.severity is Severity.ERROR] == []
    text = to_text(spec)
    loaded = load_text(text)
    assert [found for found in loaded.diagnostics if found.severity is Severity.ERROR] == []
    assert loaded.spec == spec
    assert to_text(loaded.spec) == text
    if spec.has_model:
        assert len({id(layer) for layer in loaded.spec.model.layers}) == len(set(spec.model.layers))

"""Nodes and sources: equality of nodes, and positions in a source."""

from __future__ import annotations

import copy
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from support.plans import moe_plan

from moec.codegen.folder import PlanError
from moec.grammar import Source, Span
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Rope, Zipf
from moec.grammar.syntax.tree import Name, Number
from moec.runtime.errors import CallError, JobError

SOURCE = Source("m.moe", "a = 1\r\nbé = 2\n")


def test_spans_take_no_part_in_equality_and_hash() -> None:
    plain, placed = Zipf(s=1.0), Zipf(s=1.0).with_spans({"": Span(SOURCE, 0, 1)})
    assert plain == placed
    assert hash(plain) == hash(placed)
    assert plain.span() is None
    assert placed.span("s") == placed.span() == Span(SOURCE, 0, 1)


def test_a_copy_keeps_its_spans() -> None:
    placed = Rope().with_spans({"": Span(SOURCE, 0, 1)})
    assert placed.replace(theta=2.0).span() == Span(SOURCE, 0, 1)


def test_given_tells_what_was_written_from_what_is_a_default() -> None:
    assert Rope(theta=10_000.0).given("theta")
    assert not Rope().given("theta")


def test_positions_count_from_one() -> None:
    assert SOURCE.position(0) == (1, 1)
    assert SOURCE.position(7) == (2, 1)
    assert SOURCE.position(len(SOURCE.text)) == (3, 1)
    assert (SOURCE.line(1), SOURCE.line(2), SOURCE.line(3)) == ("a = 1", "bé = 2", "")


def test_a_name_that_a_node_does_not_have_comes_with_those_it_has() -> None:
    with pytest.raises(AttributeError, match=r"Rope has no thet: did you mean `theta`\? allowed here: .*theta"):
        _ = Rope().thet  # type: ignore[attr-defined]


def test_a_plan_goes_to_other_processes_and_into_copies() -> None:
    plan = moe_plan()
    for other in (ForkingPickler.loads(ForkingPickler.dumps(plan)), copy.deepcopy(plan)):
        assert other.spec == plan.spec
        assert other.spec.model.span("dim") == plan.spec.model.span("dim")
        assert other.spec.train.given("batch")
        with pytest.raises(AttributeError, match="frozen"):
            other.spec.model.dim = 4


def test_errors_come_back_from_other_processes() -> None:
    raised = (
        PlanError("MOE0600", Path("a.plan"), "no", "way"),
        JobError("MOE0702", "words"),
        CallError("MOE0750", "x"),
    )
    for error in (*raised, DiagnosticError(raised[0].diagnostics)):
        error.add_note("a note")
        other = ForkingPickler.loads(ForkingPickler.dumps(error))
        assert type(other) is type(error)
        assert (str(other), other.diagnostics, other.__notes__) == (str(error), error.diagnostics, ["a note"])


def test_nodes_of_the_syntax_are_equal_wherever_they_stand() -> None:
    one, other = Number("8", Span(SOURCE, 0, 1)), Number("8", Span(SOURCE, 4, 5))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Name("8", one.span)
    assert repr(one) == "Number('8')"
    with pytest.raises(AttributeError, match="Number is frozen"):
        one.text = "9"  # type: ignore[misc]

"""Nodes and sources: equality of nodes, and positions in a source."""

from __future__ import annotations

from moec.grammar import Source, Span
from moec.grammar.spec import Rope, Zipf

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

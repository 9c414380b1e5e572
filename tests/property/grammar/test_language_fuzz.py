"""Any text gives diagnostics or a Spec, never an exception, and spans within the text."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from moec.grammar import load_file, load_text, render, to_text
from moec.grammar.checking.supported import unsupported
from moec.grammar.diagnostics import CODES, STYLES, Severity
from moec.grammar.format import formatted
from moec.grammar.load import Loaded
from moec.grammar.resolve.files import source_of
from moec.grammar.schema import fields
from moec.grammar.schema_in_words import vocabulary
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tables import KEYWORDS

GOOD = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[2].glob("cases/*.moe"))]
WORDS = sorted({*vocabulary(), *(word for every in vocabulary().values() for cls in every for word in fields(cls))})
LITERALS = ["0", "1", "2", "8", "64", "0.5", "1e-5", "8GB", "450GB/s", "2us", "3k", '"a"', '"b"', "9" * 30, "1e400"]
PIECES = [*KEYWORDS, *WORDS, *LITERALS, "\n", "\n", " ", ";", "#", '"', "é", "\t", "\r\n"]
LONGEST_SECONDS = 1.0
"""Processor seconds: fifty times the longest input's, so that only a runaway exceeds it."""


def assert_in_good_order(loaded: Loaded) -> None:
    errors = [found for found in loaded.diagnostics if found.severity is Severity.ERROR]
    assert (loaded.spec is None) == bool(errors)
    for found in loaded.diagnostics:
        assert found.code in CODES
        for span in (found.span, *(label.span for label in found.labels)):
            if span:
                assert 0 <= span.start <= span.end <= len(span.source.text)
    for style in STYLES:
        render(loaded.diagnostics, style, color=True)
    if loaded.spec:
        unsupported(loaded.spec)
        assert load_text(to_text(loaded.spec)).spec == loaded.spec


@examples(40, 750)
@given(data=st.binary(max_size=300))
def test_bytes(data: bytes, tmp_path_factory: object) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "fuzz.moe"  # type: ignore[attr-defined]
    path.write_bytes(data)
    assert_in_good_order(load_file(path))


@examples(40, 750)
@given(text=st.text(max_size=200))
def test_characters(text: str) -> None:
    assert_in_good_order(load_text(text))


@examples(80, 2000)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=60))
def test_token_soup(pieces: list[str]) -> None:
    text = " ".join(pieces)
    assert_in_good_order(load_text(text))


@examples(60, 1250)
@given(
    good=st.sampled_from(GOOD),
    edits=st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True), st.integers(0, 12), st.one_of(st.sampled_from(PIECES), st.just(""))
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_mutated_files(good: str, edits: list[tuple[float, int, str]]) -> None:
    text = good
    for place, length, replacement in edits:
        at = int(place * len(text))
        text = text[:at] + replacement + text[at + length :]
    assert_in_good_order(load_text(text))


@examples(25, 500)
@given(good=st.sampled_from(GOOD), value=st.one_of(st.text(max_size=20), st.integers(), st.floats()))
def test_overrides(good: str, value: str | int | float) -> None:
    lets: dict[str, str | int | float] = dict.fromkeys(("experts", "dim", "small", "x"), value)
    assert_in_good_order(load_text(good, lets=lets))


def made_up(dice: random.Random) -> bytes:
    """Random bytes, random tokens, or a good file with a few edits."""
    kind = dice.randrange(10)
    if kind == 0:
        return dice.randbytes(dice.randrange(200))
    if kind < 4:
        return " ".join(dice.choices(PIECES, k=dice.randrange(60))).encode()
    text = dice.choice(GOOD)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(text))
        text = text[:at] + dice.choice([*PIECES, ""]) + text[at + dice.randrange(12) :]
    return text.encode()


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 500), *(pytest.param(n, 10_000, marks=pytest.mark.slow) for n in range(1, 11))]
)
def test_any_input_gives_diagnostics_or_a_spec_quickly(seed: int, count: int) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        data = made_up(dice)
        started = time.process_time()
        source, found = source_of(data, "fuzz.moe")
        if source is not None:
            loaded = load_text(source.text)
            assert (loaded.spec is None) == any(one.severity is Severity.ERROR for one in loaded.diagnostics)
            if not parse(source)[1]:
                formatted(source)
            found = [*loaded.diagnostics]
        render(found)
        assert time.process_time() - started < LONGEST_SECONDS, data

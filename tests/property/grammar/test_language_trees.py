"""Trees to text and back; the formatter keeps meaning and is idempotent."""

from __future__ import annotations

from pathlib import Path

import trees
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from vocabulary import specs

from moec.grammar import Spec, load_text, to_text
from moec.grammar.format import formatted
from moec.grammar.source import Source
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tokens import lex
from moec.grammar.syntax.tree import File
from moec.grammar.syntax.write import write

ROOT = Path(__file__).parents[3]
GOOD = [
    path.read_text(encoding="utf-8")
    for folder in ("tests/cases", "examples", "grammar/library", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.moe"))
]
COMMENTS = ["# c", "#", "# a, b", "# }"]


def comments(text: str) -> list[str]:
    return sorted(token.text.rstrip() for token in lex(text, comments=True) if token.kind == "COMMENT")


def assert_laid_out(text: str) -> None:
    """`formatted` is idempotent, keeps every comment, and (it checks itself) says the same."""
    once = formatted(Source("x.moe", text))
    assert formatted(Source("x.moe", once)) == once
    assert comments(once) == comments(text)
    assert parse(Source("", once))[0] == parse(Source("", text))[0]


@examples(30, 500)
@given(tree=trees.files)
def test_a_tree_reads_back_from_its_text(tree: File) -> None:
    again, errors = parse(Source("", write(tree)))
    assert errors == []
    assert again == tree


@examples(20, 500)
@given(tree=trees.files)
def test_any_tree_is_laid_out(tree: File) -> None:
    assert_laid_out(write(tree))


@examples(3, 100)
@given(spec=specs())
def test_laying_out_keeps_the_spec(spec: Spec) -> None:
    assert load_text(formatted(Source("x.moe", to_text(spec)))).spec == spec


@examples(30, 1000)
@given(
    good=st.sampled_from(GOOD),
    planted=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([*COMMENTS, "\n", "\n\n", "  "]))),
)
def test_files_with_comments_anywhere_are_laid_out(good: str, planted: list[tuple[float, str]]) -> None:
    text = good
    for place, what in planted:
        tokens = lex(text, comments=True)
        at = tokens[int(place * len(tokens))].start
        text = text[:at] + (f"{what}\n" if what.startswith("#") else what) + text[at:]
    tree, errors = parse(Source("", text))
    assume(tree is not None and not errors)
    assert_laid_out(text)


def test_every_file_of_the_project_is_laid_out_to_the_same_spec() -> None:
    for text in GOOD:
        assert_laid_out(text)

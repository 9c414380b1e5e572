"""Random syntax trees over the whole grammar."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from moec.grammar.source import Source, Span
from moec.grammar.syntax import tree as t
from moec.grammar.syntax.tables import KEYWORDS

HERE = Span(Source("", ""), 0, 0)
words = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,6}", fullmatch=True).filter(lambda word: word not in KEYWORDS)
names = st.builds(t.Name, words, st.just(HERE))
numbers = st.builds(
    t.Number,
    st.from_regex(r"(0|[1-9][0-9]{0,3}(_[0-9]{3})?)(\.[0-9]{1,3})?(e-?[0-9])?(GB/s|us|k|MiB)?", fullmatch=True),
    st.just(HERE),
)
printing = st.characters(exclude_characters='"').filter(str.isprintable)
strings = st.builds(t.String, st.text(printing, max_size=6), st.just(HERE))


def sums(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Products, sums of them, and signs, as the grammar nests them."""

    def operation(operators: str, operand: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        rest = st.lists(st.tuples(st.sampled_from(operators), operand), min_size=1, max_size=3).map(tuple)
        return st.builds(t.Operation, operand, rest, st.just(HERE))

    factors = inner | st.builds(t.Negative, inner, st.just(HERE))
    products = operation("*/", factors)
    return operation("+-", factors | products) | products | factors


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arguments = st.builds(t.Argument, st.none() | names, inner, st.just(HERE))
    calls = st.builds(t.Call, names, st.lists(arguments, max_size=3).map(tuple), st.just(HERE))
    lists = st.builds(t.Sequence, st.lists(inner, max_size=3).map(tuple), st.just(HERE))
    return sums(calls | lists | inner.filter(lambda value: not isinstance(value, t.Range)))


values = st.recursive(numbers | strings | names, compound, max_leaves=8)
ranges = st.builds(t.Range, sums(numbers | names), sums(numbers | names), st.none() | numbers, st.just(HERE))
selectors = st.builds(t.Range, numbers | names, numbers | names, st.none() | numbers | names, st.just(HERE))
simple = (
    st.builds(t.Use, strings, st.just(HERE))
    | st.builds(t.Let, names, values | ranges, st.just(HERE))
    | st.builds(t.Assignment, names, values | ranges, st.just(HERE))
)


def blocks(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, max_size=3).map(tuple)
    selector = st.none() | numbers | names | selectors
    return st.builds(t.Block, names, st.none() | strings, selector, body, st.just(HERE))


files = st.lists(st.recursive(simple, blocks, max_leaves=8), max_size=4).map(lambda body: t.File(tuple(body), HERE))

"""Warnings that a file accepts by a comment: `group = rank  # accept: MOE0315`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity
from moec.grammar.source import Source, Span
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tokens import lex
from moec.grammar.syntax.tree import Bad, Block, Statement

ACCEPTS = re.compile(r"#(?:.*;)?\s*accept:((?:[\s,]*MOE[0-9]{4}\b)+)")
"""A comment that begins with `accept:` and codes, or has them behind a `;`."""


def not_accepted(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The diagnostics without warnings that begin in a statement whose comment accepts their code.

    A comment belongs to the statement in which or behind which it stands, and behind an opening brace to the block:
    `moec fmt` moves it to another line, and never to another statement.
    """
    found = list(diagnostics)
    sources = {one.span.source for one in found if one.span is not None and one.severity is not Severity.ERROR}
    accepted = [pair for source in sources if "accept:" in source.text for pair in _accepting(source)]
    return [one for one in found if one.severity is Severity.ERROR or not any(_holds(one, *pair) for pair in accepted)]


def _holds(found: Diagnostic, codes: str, at: Span) -> bool:
    place = found.span
    return place is not None and place.source == at.source and at.start <= place.start < at.end and found.code in codes


def _accepting(source: Source) -> Iterator[tuple[str, Span]]:
    """The codes of each comment that accepts some, and the statement to which it belongs."""
    tree, _ = parse(source)
    for token in lex(source.text, comments=True):
        accepts = ACCEPTS.match(token.text) if token.kind == "COMMENT" else None
        statement = _statement_at(token.start, tree.body, source.text) if accepts and tree else None
        if accepts and statement:
            yield accepts[1], statement.span


def _statement_at(at: int, statements: Iterable[Statement], text: str) -> Statement | None:
    """The statement to which a comment at the offset `at` belongs; None for a comment on a line of its own."""
    earlier = [statement for statement in statements if statement.span.start < at]
    if not earlier:
        return None
    last = earlier[-1]
    if last.span.end <= at:
        return None if text[last.span.end : at].strip(" \t;") else last
    if not isinstance(last, Block | Bad):
        return last
    opens = text[last.span.start : at].rstrip(" \t").endswith("{")
    return last if opens else _statement_at(at, last.body, text)

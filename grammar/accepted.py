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
"""A comment with `accept:` and codes, at its beginning or after a `;`."""


def not_accepted(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The diagnostics without warnings that begin in a statement whose comment accepts their code.

    A comment belongs to the statement that contains it or ends before it on its line; after an opening brace it belongs
    to the block. `moec fmt` may move it to another line, but never to another statement.
    """
    kept = list(diagnostics)
    sources = {warning.span.source for warning in kept if warning.span and warning.severity is not Severity.ERROR}
    accepted = [pair for source in sources if "accept:" in source.text for pair in _accepting(source)]
    return [problem for problem in kept if not any(_accepts(problem, codes, span) for codes, span in accepted)]


def _accepts(problem: Diagnostic, codes: str, statement: Span) -> bool:
    place = problem.span
    if problem.severity is Severity.ERROR or place is None or place.source != statement.source:
        return False
    return statement.start <= place.start < statement.end and problem.code in codes


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

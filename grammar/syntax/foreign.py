"""Replaces frequent notations of other languages by moec's; other notations are plain syntax errors."""

from __future__ import annotations

from collections.abc import Callable

from moec.grammar.diagnostics.diagnostic import Diagnostic
from moec.grammar.source import Source
from moec.grammar.syntax.foreign_numbers import betas, thousands, units
from moec.grammar.syntax.foreign_quotes import paths, quoted
from moec.grammar.syntax.foreign_structure import Structure
from moec.grammar.syntax.notations import (
    Notations,
    equals,
    plain_characters,
    values_in_braces,
    whole_file,
    without_comments,
)
from moec.grammar.syntax.tokens import Token

READINGS: tuple[Callable[[Notations, list[Token]], list[Token]], ...] = (
    thousands,
    quoted,
    paths,
    values_in_braces,
    equals,
    units,
    betas,
)
"""Each function replaces one notation in the tokens of the function before it."""


def translated(source: Source, tokens: list[Token]) -> tuple[list[Token] | None, list[Diagnostic]]:
    """The tokens as they are written here, and a diagnostic per notation. No tokens where a file is JSON or YAML."""
    notations = Notations(source)
    tokens = without_comments(notations, tokens)
    tokens = plain_characters(notations, tokens)
    whole = whole_file(source, tokens)
    if whole is not None:
        return None, [whole]
    for reading in READINGS:
        tokens = reading(notations, tokens)
    tokens = Structure(notations).read(tokens)
    return tokens, notations.diagnostics

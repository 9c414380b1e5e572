"""`moec fmt`: one way to lay a file out. It has no options, keeps every comment, and never changes what a file says."""

from __future__ import annotations

from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.format.items import read_items
from moec.grammar.format.line_layout import lay_out
from moec.grammar.source import Source
from moec.grammar.syntax.parser import parse

__all__ = ["formatted"]


def formatted(source: Source) -> str:
    """The text of `source`, which parses, laid out. Returns `source`'s text if it is laid out already."""
    tree, errors = parse(source)
    assert tree is not None, "what does not parse is not laid out"
    assert not any(error.severity == "error" for error in errors)
    text = lay_out(read_items(source.text))
    again, _ = parse(Source(source.name, text))
    if again != tree:
        raise InternalError(f"laying out {source.name} would change what it says")
    return text

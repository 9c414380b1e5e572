"""Errors of the reader of a Program's text."""

from __future__ import annotations


class IrError(ValueError):
    """A text that `print_program` did not print. `line` is counted from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line, self.message = line, message


class UnreadableLineError(Exception):
    """Something in a line is wrong. `parse_program` adds the line's number and raises `IrError`."""


def quoted(text: str) -> str:
    """`text` in quotes for a message, cut to at most 60 characters."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def at_most(count: int, limit: int, items: str) -> None:
    """Requires at most `limit` of some `items`. Raises `UnreadableLineError`."""
    if count > limit:
        raise UnreadableLineError(f"there are more than {limit:_} {items}")

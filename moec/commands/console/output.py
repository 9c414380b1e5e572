"""The output of every command: lines for people, or under `--format json` one JSON document; and diagnostics.

A document is a dataclass under `@document`, or a list of them; `moec.commands.schemas` lists them, and a test writes
their JSON Schemas to docs/schemas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

from moec.commands.console.terminal import RED, RESET, colored, columns, known_columns
from moec.grammar.diagnostics import Diagnostic, printable, render

WRONG_USAGE = "MOE0017"
"""The code of a wrong command line: the command exits with 2."""

Document = TypeVar("Document")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def document(cls: type[Document]) -> type[Document]:
    """Makes `cls` a frozen dataclass, keyword-only, whose docstrings of fields go into its JSON Schema."""
    from dataclasses import dataclass  # `check` does without it, and without json

    document_class = dataclass(frozen=True, kw_only=True)(cls)
    # pydantic reads this where a schema is made; the command itself does not import pydantic.
    settings: dict[str, Any] = {"use_attribute_docstrings": True, "extra": "forbid", "strict": True}
    document_class.__pydantic_config__ = settings  # type: ignore[attr-defined]
    return document_class


def emit(style: str, lines: Callable[[], Iterable[str]], data: Callable[[], object]) -> None:
    """Prints a command's result to stdout: `data()` as JSON if `style`, the value of `--format`, is json, or `lines()`.

    Only one of the two is called. `data` makes a document, or a list of documents.
    """
    if style == "json":
        print_json(data())
    else:
        print("\n".join(lines()))


def print_json(data: object) -> None:
    """Prints one JSON document, indented, to stdout. A number that is not finite is written as null."""
    import json

    unicode = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    print(json.dumps(_plain(data), indent=2, ensure_ascii=not unicode, allow_nan=False))


def show(diagnostics: Iterable[Diagnostic], style: str) -> None:
    """Prints diagnostics to stderr, with colours where it has them. Wrong usage is one line, or folded to a width."""
    shown = list(diagnostics)
    color = style == "full" and colored(sys.stderr)
    if style == "full" and len(shown) == 1 and shown[0].code == WRONG_USAGE:
        print(_one_line(shown[0], color), file=sys.stderr)
    elif shown:
        print(render(shown, style, color=color, width=columns(sys.stderr)).rstrip("\n"), file=sys.stderr)


def _one_line(diagnostic: Diagnostic, color: bool) -> str:
    """`error[MOE0017]: what is wrong; what is meant`, in a narrow terminal folded."""
    head = f"error[{diagnostic.code}]"
    text = printable(f"{head}: {'; '.join(filter(None, (diagnostic.message, diagnostic.help)))}")
    width = known_columns(sys.stderr)
    if width is not None and len(text) > width:
        from textwrap import fill

        text = fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return text.replace(head, f"{RED}{head}{RESET}", 1) if color else text


def _plain(data: object) -> object:
    if hasattr(data, "__dataclass_fields__"):
        from dataclasses import asdict

        data = asdict(data)  # type: ignore[call-overload]
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float) and not float("-inf") < data < float("inf"):
        return None
    return data

"""The frame of every command's result: lines for people, or under `--format json` one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass


def emit(style: str, lines: Callable[[], Iterable[str]], data: Callable[[], object]) -> None:
    """Prints a command's result to stdout.

    `style`: the argument of `--format`. `data` makes the JSON: a dataclass, a TypedDict or a list of them, whose
    schema `moec.commands.schemas` lists. Only one of `lines` and `data` is called.
    """
    if style == "json":
        print_json(data())
    else:
        print("\n".join(lines()))


def print_json(document: object) -> None:
    """Prints one JSON document, indented, to stdout."""
    if is_dataclass(document) and not isinstance(document, type):
        document = asdict(document)
    print(json.dumps(document, indent=2, ensure_ascii=False))

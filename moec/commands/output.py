"""The frame of every command's result: lines for people, or under `--format json` one JSON document.

A document is a dataclass under `@document`, or a list of them; `moec.commands.schemas` lists them, and a test writes
their JSON Schemas to docs/schemas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypeVar, dataclass_transform

Document = TypeVar("Document")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def document(cls: type[Document]) -> type[Document]:
    """Makes `cls` a frozen dataclass, keyword-only, whose docstrings of fields go into its JSON Schema."""
    made = dataclass(frozen=True, kw_only=True)(cls)
    # pydantic reads this where a schema is made; the command itself does not import pydantic.
    settings: dict[str, Any] = {"use_attribute_docstrings": True, "extra": "forbid", "strict": True}
    made.__pydantic_config__ = settings  # type: ignore[attr-defined]
    return made


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
    unicode = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    print(json.dumps(_plain(data), indent=2, ensure_ascii=not unicode, allow_nan=False))


def _plain(data: object) -> object:
    if is_dataclass(data) and not isinstance(data, type):
        data = asdict(data)
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float) and not float("-inf") < data < float("inf"):
        return None
    return data

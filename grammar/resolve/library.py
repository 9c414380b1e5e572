"""The files of moec's library: models, clusters and devices."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.resolve.files import read_source
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import Statement

LIBRARY = Path(__file__).parents[1] / "library"


@cache
def library_paths() -> tuple[str, ...]:
    """The paths of the library for `use`, such as `clusters/dgx_h100`."""
    return tuple(sorted(path.relative_to(LIBRARY).with_suffix("").as_posix() for path in LIBRARY.rglob("*.moe")))


def library_names(folder: str) -> list[str]:
    """The names in the library's `folder` ("clusters", "devices")."""
    return [path.rpartition("/")[2] for path in library_paths() if path.startswith(f"{folder}/")]


def library_text(path: str) -> str:
    """The text of a library file."""
    return (LIBRARY / f"{path}.moe").read_text(encoding="utf-8")


@cache
def read_library(path: str) -> tuple[Statement, ...]:
    """The statements of a library file."""
    source, diagnostics = read_source(LIBRARY / f"{path}.moe", f"library:{path}.moe")
    tree, more = parse(source) if source else (None, [])
    if tree is None or diagnostics or more:
        raise InternalError(f"the library's {path} is not good: {[*diagnostics, *more]}")
    return tree.body

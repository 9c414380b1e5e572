"""Checks the rooms, which are the folders of source: `make check` runs it, and it prints what it has counted.

No room imports another that imports it, directly or over others; what is between a room and its own closets, the
folders inside of it, does not count. A room has at most `MOST_FILES` files, and a file at most `MOST_LINES` lines.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("grammar", "passes", "codegen", "runtime", "moec")

MOST_FILES, MOST_LINES = 25, 350


def files() -> dict[str, Path]:
    """The files of source by the modules' names; `grammar/load.py` is `moec.grammar.load`."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "moec" else ("moec", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path, known: dict[str, Path]) -> Iterator[Path]:
    """The files that a file imports anywhere, for types too."""
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names = (f"{node.module}.{alias.name}", node.module)
                yield from (known[name] for name in names[: 1 if names[0] in known else 2] if name in known)
        elif isinstance(node, ast.Import):
            yield from (known[alias.name] for alias in node.names if alias.name in known)


def room_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def neighbours(known: dict[str, Path]) -> dict[str, set[str]]:
    """The rooms that each room imports, without its closets and those whose closet it is."""
    found: dict[str, set[str]] = {room_of(path): set() for path in known.values()}
    for path in known.values():
        for other in imported(path, known):
            here, there = room_of(path), room_of(other)
            if here != there and not here.startswith(f"{there}/") and not there.startswith(f"{here}/"):
                found[here].add(there)
    return found


def circle(rooms: dict[str, set[str]]) -> list[str]:
    """A way from a room to itself, or nothing."""
    done: set[str] = set()

    def visit(room: str, way: list[str]) -> list[str]:
        if room in way:
            return [*way[way.index(room) :], room]
        if room in done:
            return []
        for other in sorted(rooms[room]):
            if found := visit(other, [*way, room]):
                return found
        done.add(room)
        return []

    return next((found for room in sorted(rooms) if (found := visit(room, []))), [])


def faults() -> Iterator[str]:
    known = files()
    rooms = neighbours(known)
    if way := circle(rooms):
        yield " imports ".join(way)
        yield from (
            f"  {path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
            for here, there in pairwise(way)
            for path in known.values()
            for other in imported(path, known)
            if (room_of(path), room_of(other)) == (here, there)
        )
    sizes = Counter(room_of(path) for path in known.values())
    for room, size in sizes.items():
        if size > MOST_FILES:
            yield f"{room} has {size} files: rebuild it into rooms of at most {MOST_FILES}"
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in known.values()}
    for file, length in lines.items():
        if length > MOST_LINES:
            yield f"{file} has {length} lines: divide it, {MOST_LINES} are the most"
    (room, size), (file, length) = sizes.most_common(1)[0], max(lines.items(), key=lambda pair: pair[1])
    print(
        f"rooms: {len(sizes)}, the largest {room} with {size} files; "
        f"files: {len(lines)}, median {statistics.median(lines.values()):g} lines, the longest {file} with {length}"
    )


if __name__ == "__main__":
    if found := list(faults()):
        sys.exit("\n".join(found))

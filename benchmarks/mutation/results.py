"""The file of outcomes, one JSON object a line, and the report of it."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutation.drawing import ROOMS, TEMPLATES, room_of
from mutation.mutant import Mutant
from mutation.trial import Outcome

COLUMNS = ("make test", "rest", "survived", "not covered")
WANTED = 0.95
"""The part of the mutants killed at all that `make test` kills."""


class Results:
    """Outcomes by the key of their mutant. A line that was cut off by an interruption does not count."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: dict[str, dict[str, Any]] = {}
        for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
            if line.endswith("\n"):
                row = json.loads(line)
                self.rows[row["key"]] = row

    def has(self, mutant: Mutant, source: bytes) -> bool:
        return mutant.key(source) in self.rows

    def add(self, mutant: Mutant, source: bytes, outcome: Outcome, seed: int) -> None:
        """Appends the outcome to the file, with the lines before and after."""
        row = {
            "key": mutant.key(source),
            "seed": seed,
            "file": mutant.file,
            "line": mutant.line,
            "kind": mutant.kind,
            "diff": diff(mutant, source),
            **asdict(outcome),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(row).encode() + b"\n")
        self.rows[row["key"]] = row


def diff(mutant: Mutant, source: bytes) -> list[str]:
    """The lines that the mutant changes, `-` and `+`."""
    changed = mutant.applied(source).decode().splitlines()
    lines = difflib.unified_diff(source.decode().splitlines(), changed, lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def untried(mutants: Sequence[Mutant], results: Results, tree: Path) -> Iterator[Mutant]:
    """The mutants that have no outcome yet."""
    return (mutant for mutant in mutants if not results.has(mutant, (tree / mutant.file).read_bytes()))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Tables by room and by kind, the part that `make test` kills, and the survivors with their diffs."""
    kinds = sorted({row["kind"] for row in rows})
    lines = [*_table("room", [*ROOMS, TEMPLATES], rows, lambda row: room_of(row["file"])), ""]
    lines += [*_table("kind", kinds, rows, lambda row: row["kind"]), ""]
    killed = Counter(row["result"] for row in rows)
    total = killed["make test"] + killed["rest"]
    if total:
        part = killed["make test"] / total
        kept = "kept" if part >= WANTED else "not kept"
        lines.append(f"`make test` kills {killed['make test']} of {total} that are killed at all: {part:.1%}, {kept}.")
    lines.append(f"{sum(row['how'] == 'timeout' for row in rows)} of them by a timeout.")
    if rows:
        lines.append(f"Of all {len(rows)} mutants the tests kill {total / len(rows):.1%}.")
    for result, title in (
        ("rest", "killed by the rest alone"),
        ("survived", "survivors"),
        ("not covered", "not covered"),
    ):
        chosen = [row for row in rows if row["result"] == result]
        lines += ["", f"{title}: {len(chosen)}"] if chosen else []
        for row in chosen:
            by = f", by {row['by']}" if row["by"] else ""
            lines += [f"{row['file']}:{row['line']} {row['kind']}, {row['tests']} of {row['of']} tests{by}"]
            lines += [f"  {line}" for line in row["diff"]]
    return "\n".join(lines)


def _table(title: str, names: Sequence[str], rows: Sequence[dict[str, Any]], name_of: Any) -> Iterator[str]:
    yield f"| {title} | mutants | killed by `make test` | by the rest alone | survived both | not covered | seconds |"
    yield "|---|" + "---:|" * (len(COLUMNS) + 2)
    for name in (*names, None):
        of = [row for row in rows if name is None or name_of(row) == name]
        counts = Counter(row["result"] for row in of)
        seconds = sum(sum(row["seconds"]) for row in of)
        cells = [len(of), *(counts[column] for column in COLUMNS), round(seconds)]
        yield f"| {name or 'all'} | " + " | ".join(map(str, cells)) + " |"

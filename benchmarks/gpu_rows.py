"""What `gpu.py` measures, and its file of JSON lines: one row for each measurement, written as soon as it is there.

A row has the measurement's `key`, the kind of device that it was measured `on` ("cuda", "cpu"), the measurement's
arguments, and its results, or the reason why there are none, `failed`. A line that a kill cut short is no row. The file
is only ever appended to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing to measure, by `function` ("module:name"), which takes the device and `arguments` and returns a dict.

    Measurements of one `group` that follow one another share a process, until one of them ends it. One that takes
    longer than `limit` seconds has failed.
    """

    key: str
    group: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 60.0


@dataclass(frozen=True, slots=True)
class RowFile:
    path: Path

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one line to the end, on disk when this returns. A line cut short before it stays a line of its own."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            cut = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * cut + json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> Iterator[Row]:
        """The rows so far, in the order they were written. Of two with one key on one device the later counts."""
        if not self.path.exists():
            return
        last: dict[tuple[str, str], Row] = {}
        for line in self.path.read_bytes().split(b"\n"):
            row = _read(line)
            if row is not None:
                last[row["key"], row["on"]] = row
        yield from last.values()

    def missing(self, measurements: Sequence[Measurement], on: str, *, again: bool) -> list[Measurement]:
        """Those without a row on this kind of device, and with `again` those that failed."""
        done = {row["key"] for row in self.rows() if row["on"] == on and not (again and "failed" in row)}
        return [one for one in measurements if one.key not in done]


def _read(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"key", "on"} <= row.keys() else None

"""The output of benchmarks: one table, and JSON on request."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `limit` is its upper bound in the same unit, or None."""

    what: str
    value: float
    unit: str = ""
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.limit is None else self.value / self.limit


def parser(description: str) -> argparse.ArgumentParser:
    """Options for a benchmark, with `--json` among them."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as well")
    return made


def report(title: str, rows: Sequence[Row], json_file: Path | None) -> None:
    """Prints the table, and writes it to `json_file`."""
    table = Table(title=f"{title} ({os.cpu_count()} cores)", title_justify="left")
    for name in ("", "measured", "limit", "of the limit"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g} {row.unit}".strip()
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}" + (" over" if row.ratio > 1 else "")
        table.add_row(row.what, f"{row.value:.4g} {row.unit}".strip(), limit, ratio)
    Console(width=None if os.isatty(1) else 110).print(table)
    if json_file:
        content = [asdict(row) | {"ratio": row.ratio} for row in rows]
        json_file.write_text(json.dumps({"title": title, "cores": os.cpu_count(), "rows": content}, indent=1) + "\n")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)

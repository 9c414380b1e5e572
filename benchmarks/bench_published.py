"""The planner's predicted steps against published ones, from a folder with `published.yaml` and `published_rows.yaml`.

Without `--rows FOLDER` or MOEC_PUBLISHED_ROWS it measures nothing. Every row is stated as it was run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from planning.rows import Published, Rows
from planning.score import Scored, predicted, score, winners
from planning.sources import read
from rich.console import Console
from rich.table import Table

from moec.grammar.diagnostics import DiagnosticError

FOLDER = "MOEC_PUBLISHED_ROWS"
LIMITS = "limits: mean 4 %, worst 8 %, tau 0.95"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, metavar="FOLDER", default=os.environ.get(FOLDER))
    folder = options.parse_args().rows
    if folder is None:
        print(f"nothing to score: neither --rows nor {FOLDER} names a folder of published rows")
        return
    console = Console(width=None if os.isatty(1) else 150)
    folding, newer = read(Path(folder))
    every = scored(folding)
    print_rows(console, f"Folding rows ({LIMITS})", every)
    print_scores(console, "Folding rows", every, [("all", lambda row: "")])
    later = scored(newer)
    exact, ranked = ([row for row in later if row.row.ranks_only == only] for only in (False, True))
    print_rows(console, "newer rows in bf16", exact)
    print_scores(console, "newer rows in bf16", exact, GROUPS)
    print_rows(console, "newer rows for rank order only", ranked, errors=False)
    print_scores(console, "newer rows for rank order only", ranked, GROUPS, errors=False)
    print_pairs(console, every + later)
    for name, why in folding.left_out + newer.left_out:
        console.print(f"left out: {name}: {why}", markup=False, highlight=False, soft_wrap=True)


GROUPS: list[tuple[str, Callable[[Published], str]]] = [
    ("all", lambda row: ""),
    ("source", lambda row: row.source),
    ("device and precision", lambda row: f"{row.device} {row.precision}"),
    ("model", lambda row: row.model),
]


def scored(rows: Rows) -> list[Scored]:
    """The predictions; a row that moec refuses joins those that are left out."""
    found = []
    for row in rows.stated:
        try:
            found.append(predicted(row))
        except DiagnosticError as refused:
            rows.left_out.append((row.name, "; ".join(f"{d.code} {d.message}" for d in refused.diagnostics)))
    return found


def print_rows(console: Console, title: str, rows: Sequence[Scored], errors: bool = True) -> None:
    table = Table("row", "step, s", "MFU", "published", "error", "assumed", title=title, title_justify="left")
    for row in rows:
        numbers = (f"{row.seconds:.4g}", f"{row.predicted:.3f}", f"{row.published:.3f}")
        table.add_row(row.row.name, *numbers, f"{row.error:+.1%}" if errors else "", "; ".join(row.row.assumed))
    console.print(table, markup=False, highlight=False)


def print_scores(
    console: Console,
    title: str,
    rows: Sequence[Scored],
    groups: Sequence[tuple[str, Callable[[Published], str]]],
    errors: bool = True,
) -> None:
    """The score of each group of at least two rows; without `errors` only the rank order."""
    table = Table("rows of", "rows", "mean error", "worst", "signed", "τ", title=title, title_justify="left")
    for what, key in groups:
        for value in sorted({key(row.row) for row in rows}):
            chosen = [row for row in rows if key(row.row) == value]
            if len(chosen) > 1:
                s = score(chosen)
                numbers = [f"{s.mean:.1%}", f"{s.worst:+.1%}", f"{s.signed:+.1%}"] if errors else [""] * 3
                table.add_row(f"{what} {value}".strip(), str(s.rows), *numbers, "" if s.tau is None else f"{s.tau:.2f}")
    console.print(table, highlight=False)


def print_pairs(console: Console, rows: Sequence[Scored]) -> None:
    """The pairs whose faster layout is not the predicted one."""
    pairs = winners(rows)
    right = sum(found for *_, found in pairs)
    console.print(
        f"pairs that differ in layout alone, by more than 5 %: {right} of {len(pairs)} winners predicted (aim: 90 %)"
    )
    for fast, slow, found in pairs:
        if not found:
            console.print(f"  not predicted: {fast.row.name} over {slow.row.name}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()

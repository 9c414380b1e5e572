"""What the planner's cost model explains of published runs, by mechanism; the folder is that of `bench_published.py`.

Without `--rows FOLDER` or MOEC_PUBLISHED_ROWS it measures nothing. `--only TABLE` prints one table.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml
from bench_published import FOLDER
from planning import peaks, tutel
from planning.mechanisms import FITTED, error_with, fitted, leave_one_out, mean_error
from planning.rows import Rows
from planning.score import Run, predicted
from planning.sources import read
from planning.twins import twins
from rich.console import Console
from rich.table import Table


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, metavar="FOLDER", default=os.environ.get(FOLDER))
    options.add_argument("--only", choices=TABLES)
    chosen = options.parse_args()
    if chosen.rows is None:
        print(f"nothing to score: neither --rows nor {FOLDER} names a folder of published rows")
        return
    console = Console(width=None if os.isatty(1) else 150)
    for name, table in TABLES.items():
        if chosen.only in (None, name):
            console.print(table(Path(chosen.rows)), markup=False, highlight=False)


def tutel_table(folder: Path) -> Table:
    table = Table("GPUs", "gain of", "predicted", "published", title="Tutel's single layer", title_justify="left")
    for row in yaml.safe_load((folder / "published.yaml").read_text())["tutel"]["single_layer"]:
        stated = tutel.published(row)
        for step, gain in tutel.gains(row["gpus"]).items():
            table.add_row(str(row["gpus"]), step, f"{gain:.2f}", f"{stated[step]:.2f}" if step in stated else "")
    return table


def leave_one_out_table(folder: Path) -> Table:
    folding, newer = (runs_of(rows) for rows in read(folder))
    title = f"mean errors, now {mean_of(folding):.1%} and {mean_of(newer):.1%}, when one mechanism is left out"
    columns = ("left out", "Folding", "newer, bf16", "shows on", "error there")
    table = Table(*columns, title=title, title_justify="left")
    for each in leave_one_out(folding, newer):
        moved = f"{each.was:+.1%} to {each.shows.error:+.1%}"
        table.add_row(each.name, f"{each.folding:.1%}", f"{each.newer:.1%}", each.shows.row.name, moved)
    return table


def refitted_table(folder: Path) -> Table:
    folding = runs_of(read(folder)[0])
    models = sorted({run.row.model for run in folding})
    title = "constants fitted to all Folding rows, and to those of other models"
    table = Table("fitted without", *FITTED, "its rows", "with all fitted", title=title, title_justify="left")
    of_all = fitted(folding)
    for left_out in ("", *models):
        constants = fitted([run for run in folding if run.row.model != left_out])
        own = [run for run in folding if left_out in ("", run.row.model)]
        values = [f"{constants[name]:.2f}" for name in FITTED]
        table.add_row(left_out or "none", *values, *(f"{error_with(c, own):.1%}" for c in (constants, of_all)))
    return table


def memory_table(folder: Path) -> Table:
    found = peaks.errors(runs_of(read(folder)[1]))
    mean, signed = (statistics.fmean(f(error) for *_, error in found) for f in (abs, float))
    title = f"peaks of memory: mean error {mean:.1%}, signed {signed:+.1%}"
    table = Table("row", "predicted, GB", "published, GB", "error", title=title, title_justify="left")
    for run, peak, error in found:
        table.add_row(run.row.name, f"{peak * (1 + error) / 1e9:.1f}", f"{peak / 1e9:.1f}", f"{error:+.1%}")
    for each in peaks.pipelined(yaml.safe_load((folder / "published_rows.yaml").read_text())["rows"]):
        stated = "out of 288" if each.published is None else f"{each.published / 1e9:.1f}"
        error = "" if each.published is None else f"{each.predicted / each.published - 1:+.1%}"
        table.add_row(f"qwen3-235b-a22b, 32 mi355x: {each.words}", f"{each.predicted / 1e9:.1f}", stated, error)
    return table


def twins_table(folder: Path) -> Table:
    title = "rows with a learned router: the load that explains their speed"
    columns = ("row", "error with an even load", "learned over even", "routing", "busiest rank over mean")
    table = Table(*columns, title=title, title_justify="left")
    for twin in twins(runs_of(read(folder)[1])):
        numbers = (f"{twin.even:+.1%}", f"{twin.run.row.learned:.2f}", f"zipf({twin.exponent:.2f})", f"{twin.skew:.2f}")
        table.add_row(twin.run.row.name, *numbers)
    return table


def precisions_table(folder: Path) -> Table:
    """Over what bf16 is predicted to reach: its errors are in all of them, so one precision's figure over bf16's says
    what its products gain."""
    title = "published speed over the predicted one of the same plan in bf16, by precision"
    table = Table("device", "precision", "rows", "least", "median", "most", title=title, title_justify="left")
    found = defaultdict[tuple[str, str], list[float]](list)
    for row in read(folder)[1].stated:
        if not any(words.startswith("batch") for words in row.assumed):
            scored = predicted(row)
            found[row.device, row.precision].append(scored.published / scored.predicted)
    for (device, precision), ratios in sorted(found.items()):
        numbers = (f"{f(ratios):.2f}" for f in (min, statistics.median, max))
        table.add_row(device, precision, str(len(ratios)), *numbers)
    return table


def runs_of(rows: Rows) -> list[Run]:
    """The rows whose errors say something."""
    return [Run.of(row) for row in rows.stated if not row.ranks_only]


def mean_of(runs: Sequence[Run]) -> float:
    return mean_error([run.scored() for run in runs])


TABLES: Mapping[str, Callable[[Path], Table]] = {
    "tutel": tutel_table,
    "leave-one-out": leave_one_out_table,
    "refitted": refitted_table,
    "memory": memory_table,
    "routing": twins_table,
    "precision": precisions_table,
}


if __name__ == "__main__":
    main()

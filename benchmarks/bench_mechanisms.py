"""What the planner's cost model explains of published runs, by mechanism; the folder is that of `bench_published.py`.

Without `--rows FOLDER` or MOEC_PUBLISHED_ROWS it measures nothing. `--only TABLE` prints one table.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from bench_published import FOLDER
from planning import tutel
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


TABLES: Mapping[str, Callable[[Path], Table]] = {"tutel": tutel_table}


if __name__ == "__main__":
    main()

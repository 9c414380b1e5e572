"""`moec tune`: what was measured, as a table, and the plan with the winners."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from moec.driver import load
from moec.runtime.tune.tuning import MOST, Tuning, tune

HEAD = ("experts", "rows", "tried", "default", "tuned", "default ms", "tuned ms", "ratio")


def run(path: Path, output: Path | None, most: int | None) -> None:
    """Measures the plan in `path` and writes it to `output`, or back. Raises `DiagnosticError`."""
    plan = load(path)
    device = plan.spec.cluster.device
    if device.kind == "cpu":
        print(f"{plan.name}: on {device.name} plain torch does the work; there is nothing to tune")
        return
    tuning = tune(plan, most=most or MOST, say=lambda line: print(line, file=sys.stderr, flush=True))
    if not tuning.results:
        print(f"{plan.name}: it has no experts that kernels run; there is nothing to tune")
        return
    written = tuning.plan.save(output or path)
    print("\n".join(_lines(tuning, written)))


def _lines(tuning: Tuning, written: Path) -> Iterator[str]:
    yield f"{tuning.plan.name}: a layer's experts, forward and backward, measured on {tuning.device}"
    yield ""
    rows = [HEAD]
    for found in tuning.results:
        default, best = (f"{tiles.up} / {tiles.down}" for tiles in (found.default, found.best))
        rows.append(
            (
                str(found.products.key),
                f"{found.rows:,}",
                str(found.tried),
                default,
                "the same" if found.best == found.default else best,
                f"{found.default_ms:.3f}",
                f"{found.best_ms:.3f}",
                f"{found.default_ms / found.best_ms:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        yield ("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()
    yield ""
    for found in tuning.results:
        if found.wrong:
            yield f"  {found.products.key}: {found.wrong} pairs of tiles gave other numbers than the default: left out"
    yield f"{written} has them in tiles.json, and its kernels are rendered with them"

"""`moec tune`: a table of the measurements, and the plan with the fastest tiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from moec.driver import load
from moec.runtime.tune.tuning import MOST, Tuning, tune

HEAD = ("experts", "rows", "tried", "default", "tuned", "default ms", "tuned ms", "ratio")


def run(path: Path, output: Path | None, most: int | None) -> None:
    """Measures the plan in `path` and writes it to `output` (default: `path`). Raises `DiagnosticError`."""
    plan = load(path)
    device = plan.spec.cluster.device
    if device.kind == "cpu":
        print(f"{plan.name}: on {device.name} plain torch runs everything; there is nothing to tune")
        return
    tuning = tune(plan, most=most or MOST, report=lambda line: print(line, file=sys.stderr, flush=True))
    if not tuning.results:
        print(f"{plan.name}: no kernel runs its experts; there is nothing to tune")
        return
    written = tuning.plan.save(output or path)
    print("\n".join(_lines(tuning, written)))


def _lines(tuning: Tuning, written: Path) -> Iterator[str]:
    yield f"{tuning.plan.name}: a layer's experts, forward and backward, measured on {tuning.device}"
    yield ""
    rows = [HEAD]
    for tuned in tuning.results:
        rows.append(
            (
                str(tuned.products.key),
                f"{tuned.rows:,}",
                str(tuned.tried),
                str(tuned.default),
                "the same" if tuned.best == tuned.default else str(tuned.best),
                f"{tuned.default_ms:.3f}",
                f"{tuned.best_ms:.3f}",
                f"{tuned.default_ms / tuned.best_ms:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        yield ("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()
    yield ""
    for tuned in tuning.results:
        if tuned.wrong:
            yield f"  {tuned.products.key}: {tuned.wrong} ways were wrong, and are left out"
    yield f"wrote them to tiles.json in {written}: its kernels are rendered with them"

"""`moec tune`: a table of the measurements, and the plan with the fastest tiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from moec.codegen.kernels.tiles import KERNELS
from moec.commands.console.given_plan import given_plan
from moec.commands.console.other_files import require_plan
from moec.commands.console.output import document, emit
from moec.commands.console.table import table
from moec.runtime.tune.tune_search import Tuned
from moec.runtime.tune.tuning import MOST, Tuning, tune

HEAD = ("product", "tried", "default", "ms", "tuned", "ms")


@document
class TunedShape:
    """The measured ways of one shape of experts. Times are milliseconds."""

    shape: str
    rows: int
    """Rows of the layer that was measured."""
    default_ms: float
    """Forward and backward of the whole layer with the default tiles."""
    tuned_ms: float
    """The same with the fastest tiles; equal to `default_ms` where the default stays."""
    tiles: dict[str, str]
    """The fastest tiles of each product."""
    wrong: int
    """How many ways gave other numbers, and are left out."""


@document
class TunedPlan:
    """What `moec tune` measured and wrote."""

    plan: str | None
    """The folder of the tuned plan; null where there is nothing to tune."""
    device: str
    shapes: list[TunedShape]


def run(path: Path, output: Path | None, tries: int | None, style: str = "full") -> None:
    """Measures the plan in `path` and writes it to `output` (default: `path`). Raises `DiagnosticError`."""
    require_plan(path, "moec tune")
    plan = given_plan(path, style)
    device = plan.spec.cluster.device
    if device.kind == "cpu":
        reason = f"{plan.name}: on {device.name} plain torch runs everything; there is nothing to tune"
        emit(style, lambda: [reason], lambda: TunedPlan(plan=None, device=device.name, shapes=[]))
        return
    tuning = tune(plan, max_tiles=tries or MOST, report=lambda line: print(line, file=sys.stderr, flush=True))
    if not tuning.results:
        reason = f"{plan.name}: no kernel runs its experts; there is nothing to tune"
        emit(style, lambda: [reason], lambda: TunedPlan(plan=None, device=tuning.device, shapes=[]))
        return
    written = tuning.plan.save(output or path)
    emit(style, lambda: _lines(tuning, written), lambda: _document(tuning, written))


def _document(tuning: Tuning, written: Path) -> TunedPlan:
    shapes = [
        TunedShape(
            shape=str(tuned.products.key),
            rows=tuned.rows,
            default_ms=tuned.default_ms,
            tuned_ms=tuned.best_ms,
            tiles={kernel: str(tuned.best.of(kernel)) for kernel in KERNELS},
            wrong=tuned.wrong,
        )
        for tuned in tuning.results
    ]
    return TunedPlan(plan=str(written), device=tuning.device, shapes=shapes)


def _lines(tuning: Tuning, written: Path) -> Iterator[str]:
    yield f"{tuning.plan.name}: a layer's experts, measured on {tuning.device}"
    for tuned in tuning.results:
        yield from ("", f"  {tuned.products.key}, {tuned.rows:,} rows")
        rows = [HEAD, *_product_rows(tuned)]
        yield from table(rows, indent=4)
        ratio = tuned.default_ms / tuned.best_ms
        result = (
            "the default stays"
            if tuned.best == tuned.default
            else f"tuned {tuned.best_ms:.3f} ms, {ratio:.2f} x as fast"
        )
        yield f"    forward and backward as a whole: default {tuned.default_ms:.3f} ms, {result}"
        if tuned.wrong:
            yield f"    {tuned.wrong} ways gave other numbers, and are left out"
    yield from ("", f"wrote them to tiles.json in {written}: its kernels are rendered with them")


def _product_rows(tuned: Tuned) -> Iterator[tuple[str, ...]]:
    """A row of the table for each product."""
    for kernel in KERNELS:
        default, best = tuned.default.of(kernel), tuned.best.of(kernel)
        tuned_cells = ("the same", "") if best == default else (str(best), f"{tuned.times[kernel, best]:.3f}")
        yield kernel, str(tuned.tried(kernel)), str(default), f"{tuned.times[kernel, default]:.3f}", *tuned_cells

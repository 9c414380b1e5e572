"""What loads of ranks mean for a step: percentiles over layers and iterations, and the numbers that a plan keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moec.grammar.spec import Measured

PLANNED = 0.95
"""The share of iterations that a plan is for."""

Rows = Any
"""The rows of each rank [iterations, layers, ranks]."""


def over_mean(rows: Rows) -> Any:
    """Rows of the busiest rank over the mean [iterations, layers]."""
    return rows.max(-1) / rows.mean(-1)


def _at_planned(values: Any) -> float:
    return float(np.quantile(values, PLANNED))


def _windows(values: Any, layers: int) -> Any:
    """Sums over each run of so many layers [iterations, runs, …]."""
    sums = np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, 1)], 1)
    return sums[:, layers:] - sums[:, :-layers]


def _kept(rows: Rows, layers: int) -> float:
    """The rows of a rank over any so many layers, over the mean. A layer counts as much as any other."""
    sums = _windows(rows / rows.mean(-1, keepdims=True), layers)
    return _at_planned((sums.max(-1) / layers).max(1))


def _time(rows: Rows, layers: int) -> float:
    """The busiest rank over the mean, on average over so many layers: those of the slowest of a pipeline's stages."""
    loads = over_mean(rows)
    starts = np.minimum(np.arange(0, loads.shape[1], layers), loads.shape[1] - layers)
    return _at_planned((_windows(loads, layers)[:, starts] / layers).max(1))


def measured(file: str, rows_on: dict[int, Rows], layers: int) -> Measured:
    """What a plan keeps of a trace: its figures for some numbers of ranks, and for the parts into which a pipeline cuts
    `layers` layers. A trace of one layer, which counts for all of them, has the same figures for each part."""
    ranks = sorted(rows_on)
    parts = sorted({-(-layers // number) for number in range(1, layers + 1)}, reverse=True)
    for_parts = [(rows, min(part, rows.shape[1])) for rows in map(rows_on.__getitem__, ranks) for part in parts]
    return Measured(
        file=file,
        ranks=tuple(ranks),
        layers=tuple(parts),
        time=_rounded([_time(*of) for of in for_parts]),
        kept=_rounded([_kept(*of) for of in for_parts]),
        most=_rounded([_at_planned(over_mean(rows_on[number]).max(1)) for number in ranks]),
    )


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(1.0, float(f"{value:.4g}")) for value in values)

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


def _sums(values: Any) -> Any:
    """Sums over the layers before each one, and over all [iterations, layers + 1, …]."""
    return np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, 1)], 1)


def _kept(sums: Any, layers: int) -> float:
    """The most rows that a rank has of any `layers` consecutive layers, over the mean. All layers count the same."""
    return _at_planned((sums[:, layers:] - sums[:, :-layers]).max((1, 2)) / layers)


def _time(sums: Any, layers: int) -> float:
    """The busiest rank over the mean, on average over the `layers` layers of a pipeline's slowest stage."""
    all_layers = sums.shape[1] - 1
    starts = np.minimum(np.arange(0, all_layers, layers), all_layers - layers)
    return _at_planned((sums[:, starts + layers] - sums[:, starts]).max(1) / layers)


def measured(file: str, rows_on: dict[int, Rows], layers: int) -> Measured:
    """What a plan keeps of a trace: its figures for some numbers of ranks, and for the parts into which a pipeline cuts
    `layers` layers. A trace of one layer, which counts for all of them, has the same figures for each part."""
    ranks = sorted(rows_on)
    parts = sorted({-(-layers // number) for number in range(1, layers + 1)}, reverse=True)
    time, kept, most = list[float](), list[float](), list[float]()
    for rows in map(rows_on.__getitem__, ranks):
        of_time, of_rows = _sums(over_mean(rows)), _sums(rows / rows.mean(-1, keepdims=True))
        of_trace = [min(part, rows.shape[1]) for part in parts]
        time += [_time(of_time, part) for part in of_trace]
        kept += [_kept(of_rows, part) for part in of_trace]
        most.append(_at_planned(over_mean(rows).max(1)))
    numbers = {"time": _rounded(time), "kept": _rounded(kept), "most": _rounded(most)}
    return Measured(file=file, ranks=tuple(ranks), layers=tuple(parts), **numbers)


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(1.0, float(f"{value:.4g}")) for value in values)

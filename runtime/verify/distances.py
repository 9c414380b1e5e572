"""Distances between tensors: relative to the largest element, and 2-norms of values that lie on ranks in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

SCALE_FLOOR = 1e-3
"""A tensor whose largest element is below this part of its kind's largest is measured against the kind: a gradient that
is pure noise has no scale of its own."""

Part = tuple[tuple[slice, ...], Tensor]
"""An index into a tensor, and a rank's values at this index."""


def relative_error(actual: object, expected: Tensor, reference: Tensor, kind_scale: float) -> float:
    """max|actual − expected| / max(max|reference|, SCALE_FLOOR · kind_scale). `expected` is a part of `reference`.

    0/0 is 0. The error is inf where the shapes differ or a value is NaN.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return math.inf
    difference = largest(actual - expected)
    if math.isnan(difference):
        return math.inf
    scale = max(largest(reference), SCALE_FLOOR * kind_scale)
    return 0.0 if difference == 0 else difference / scale if scale else math.inf


def largest(tensor: Tensor) -> float:
    """The largest absolute element, 0 of none."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def rms(tensor: Tensor) -> float:
    """The root of the mean square, 0 of none."""
    return float(tensor.norm()) / math.sqrt(max(tensor.numel(), 1))


def distance(actual: Tensor, reference: Tensor) -> float:
    """The 2-norm of the difference."""
    return float((actual - reference).norm())


def distance_of_parts(parts: Sequence[Part], reference: Tensor) -> float:
    """The 2-norm of the difference between ranks' parts and `reference`; of replicas, the larger difference counts.

    inf where shapes differ or a value is NaN.
    """
    squares: dict[tuple[tuple[int, int], ...], float] = {}
    for index, part in parts:
        expected = reference[index]
        if part.shape != expected.shape:
            return math.inf
        square = float((part.detach().double() - expected).square().sum())
        if math.isnan(square):
            return math.inf
        key = tuple((cut.start, cut.stop) for cut in index)
        squares[key] = max(squares.get(key, 0.0), square)
    return math.sqrt(sum(squares.values()))

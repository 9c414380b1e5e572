"""Distances between tensors: relative to the largest element, and 2-norms of values that lie on ranks in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

SCALE_FLOOR = 1e-3
"""A tensor whose largest element is below this part of its kind's largest is measured against the kind: a gradient that
is pure noise has no scale of its own."""

Part = tuple[tuple[slice, ...], Tensor]
"""An index, and a rank's values of what is there."""


def relative_error(got: object, expected: Tensor, whole: Tensor, kind_scale: float) -> float:
    """max|got − expected| / max(max|whole|, SCALE_FLOOR · kind_scale), 0/0 being 0; inf for other shapes or NaN."""
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return math.inf
    difference = largest(got - expected)
    if difference != difference:
        return math.inf
    scale = max(largest(whole), SCALE_FLOOR * kind_scale)
    return 0.0 if difference == 0 else difference / scale if scale else math.inf


def largest(tensor: Tensor) -> float:
    """The largest absolute element, 0 of none."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def rms(tensor: Tensor) -> float:
    """The root of the mean square, 0 of none."""
    return float(tensor.norm()) / math.sqrt(max(tensor.numel(), 1))


def distance(got: Tensor, whole: Tensor) -> float:
    """The 2-norm of the difference."""
    return float((got - whole).norm())


def distance_of(parts: Sequence[Part], whole: Tensor) -> float:
    """The same for values that lie on ranks in parts; of replicas, the one that is further off counts."""
    squares: dict[tuple[tuple[int, int], ...], float] = {}
    for index, part in parts:
        wanted = whole[index]
        if part.shape != wanted.shape:
            return math.inf
        square = float((part.detach().double() - wanted).square().sum())
        if square != square:
            return math.inf
        key = tuple((cut.start, cut.stop) for cut in index)
        squares[key] = max(squares.get(key, 0.0), square)
    return math.sqrt(sum(squares.values()))

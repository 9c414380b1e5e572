"""Numbers of costs: each is a number of one plan, or a numpy array with those of several plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Number = TypeVar("Number", int, float)


def larger(a: Number, b: Number) -> Number:
    """The larger one, of each plan."""
    return np.maximum(a, b) if _is_of_several(a, b) else max(a, b)


def smaller(a: Number, b: Number) -> Number:
    """The smaller one, of each plan."""
    return np.minimum(a, b) if _is_of_several(a, b) else min(a, b)


def whole(a: Any) -> int:
    """The number without its fraction."""
    return a // 1 if _is_of_several(a) else int(a)


def rounded(a: Any) -> int:
    """The nearest whole number."""
    result: int = np.round(a) if _is_of_several(a) else round(a)
    return result


def of_each(a: Any, of: Callable[[int], float]) -> float:
    """A function of the number, of each plan."""
    return np.reshape([of(int(n)) for n in a.flat], a.shape) if _is_of_several(a) else of(a)  # type: ignore[return-value]


def _is_of_several(*values: object) -> bool:
    return any(isinstance(value, np.ndarray) for value in values)

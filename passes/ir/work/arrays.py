"""Numbers of costs: each is a number of one plan, or a numpy array with those of several plans.

numpy is imported where there is an array: `moec compile` works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


def larger(a: Number, b: Number) -> Number:
    """The larger one, of each plan."""
    if is_number(a) and is_number(b):
        return max(a, b)
    import numpy as np

    result: Number = np.maximum(a, b)
    return result


def smaller(a: Number, b: Number) -> Number:
    """The smaller one, of each plan."""
    return -larger(-a, -b)


def whole(a: Any) -> int:
    """The number without its fraction."""
    return int(a) if is_number(a) else a // 1


def rounded(a: Any) -> int:
    """The nearest whole number."""
    result: int = round(a) if is_number(a) else a.round()
    return result


def of_each(a: Any, of: Callable[[int], float]) -> float:
    """A function of the number, of each plan."""
    if is_number(a):
        return of(a)
    import numpy as np

    return np.reshape([of(int(n)) for n in a.flat], a.shape)  # type: ignore[return-value]


def of_each_pair(a: Any, b: Any, of: Callable[[int, int], float]) -> float:
    """A function of two numbers, of each plan."""
    if is_number(a) and is_number(b):
        return of(a, b)
    import numpy as np

    pairs = np.stack(np.broadcast_arrays(a, b), -1)
    kinds, where = np.unique(pairs, axis=0, return_inverse=True)
    return np.array([of(int(x), int(y)) for x, y in kinds])[where.reshape(-1)]  # type: ignore[return-value]


def is_number(value: object) -> bool:
    """Whether it is a number of one plan, not an array."""
    return isinstance(value, int | float)

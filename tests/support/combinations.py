"""Parameters of a claim that is tried on many combinations: a few of them in `make test`, all in `make test-slow`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def diagonals(*axes: Sequence[Any], number: int = 1) -> list[Any]:
    """Every combination of the axes' values, as `pytest.param`s; those off the first `number` diagonals are slow.

    The first diagonal has every value of every axis at least once; another one is shifted by one more place per axis.
    """
    fast = {
        tuple((place + shift * axis) % len(values) for axis, values in enumerate(axes))
        for shift in range(number)
        for place in range(max(map(len, axes)))
    }
    return [
        pytest.param(
            *(values[index] for index, values in zip(places, axes, strict=True)),
            marks=() if places in fast else pytest.mark.slow,
            id="-".join(str(values[index]) for index, values in zip(places, axes, strict=True)),
        )
        for places in itertools.product(*(range(len(values)) for values in axes))
    ]


def some(values: Sequence[Any], fast: Sequence[Any]) -> list[Any]:
    """`values` as `pytest.param`s of one argument; those that are not in `fast` are slow."""
    missing = [value for value in fast if value not in values]
    assert not missing, f"{missing} are none of the values"
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow, id=str(value)) for value in values]

"""Parameters of a claim that is tried on many combinations: a few of them in `make test`, all in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import pytest


def diagonals(*axes: Sequence[Any], number: int = 1) -> list[Any]:
    """Every combination of the axes' values, as `pytest.param`s; those off the first `number` diagonals are slow.

    `diagonals("abc", "xy")`: ax, by and cx; `number=2` adds ay, bx and cy. Every value of every axis is there.
    """
    fast = {
        tuple((place + shift * axis) % len(values) for axis, values in enumerate(axes))
        for shift in range(number)
        for place in range(max(map(len, axes)))
    }
    return _parameters(axes, fast)


def some(values: Sequence[Any], fast: Sequence[Any]) -> list[Any]:
    """`values` as `pytest.param`s of one argument; those that are not in `fast` are slow."""
    missing = [value for value in fast if value not in values]
    assert not missing, f"{missing} are not among the values"
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow, id=str(value)) for value in values]


def pairs(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of the axes' values, as `pytest.param`s; slow but for rows in which every two values meet."""
    return _parameters(axes, set(covering(*map(len, axes))))


def covering(*sizes: int) -> list[tuple[int, ...]]:
    """Rows of places, one per axis of these `sizes`, in which any two places of two axes meet at least once.

    Greedy: each row begins with the first pair that is still missing, and takes on every other axis the place that
    meets most of the missing ones (AETG; Cohen et al., IEEE TSE 23(7), 1997). One axis gives a row for each place.
    """
    if len(sizes) < 2:
        return [(place,) for place in range(max(sizes, default=0))]
    missing = {
        (one, first, other, second): None
        for one, other in itertools.combinations(range(len(sizes)), 2)
        for first in range(sizes[one])
        for second in range(sizes[other])
    }
    rows = []
    while missing:
        one, first, other, second = next(iter(missing))
        row = {one: first, other: second}
        for axis in range(len(sizes)):
            if axis not in row:
                row[axis] = max(
                    range(sizes[axis]), key=lambda place, axis=axis: len(_met({**row, axis: place}, missing))
                )
        for met in _met(row, missing):
            del missing[met]
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
    return rows


def _met(row: dict[int, int], missing: Container[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Which of the missing pairs a row has, complete or not."""
    found = ((one, row[one], other, row[other]) for one, other in itertools.combinations(sorted(row), 2))
    return [pair for pair in found if pair in missing]


def _parameters(axes: Sequence[Sequence[Any]], fast: Container[tuple[int, ...]]) -> list[Any]:
    return [
        pytest.param(
            *(values[index] for index, values in zip(places, axes, strict=True)),
            marks=() if places in fast else pytest.mark.slow,
            id="-".join(str(values[index]) for index, values in zip(places, axes, strict=True)),
        )
        for places in itertools.product(*(range(len(values)) for values in axes))
    ]

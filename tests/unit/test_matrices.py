"""What `make test` leaves out of a matrix, it does not leave out of each axis."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.combinations import diagonals, some


def fast(parameters: list[Any]) -> list[tuple[Any, ...]]:
    return [parameter.values for parameter in parameters if not parameter.marks]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("axes", [("ab", "xyz"), ("abcd", "xy", "12"), ("abc",), ("ab", "xy", "12")], ids=str)
def test_diagonals_have_every_value_and_the_matrix_every_combination(axes: tuple[str, ...], number: int) -> None:
    parameters = diagonals(*axes, number=number)
    assert [parameter.values for parameter in parameters] == list(itertools.product(*axes))
    assert all([mark.name for mark in parameter.marks] in ([], ["slow"]) for parameter in parameters)
    assert [set(values) for values in zip(*fast(parameters), strict=True)] == [set(axis) for axis in axes]
    assert max(map(len, axes)) <= len(fast(parameters)) <= number * max(map(len, axes))


def test_of_some_values_the_others_are_slow() -> None:
    parameters = some(["a", "b", "c"], ["b"])
    assert [parameter.values for parameter in parameters] == [("a",), ("b",), ("c",)]
    assert fast(parameters) == [("b",)]
    with pytest.raises(AssertionError, match="are none of the values"):
        some(["a"], ["b"])

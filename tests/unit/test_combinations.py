"""`make test` tries every value of every axis, if not every combination."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from support.combinations import diagonals, pairs, some


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
    with pytest.raises(AssertionError, match="are not among the values"):
        some(["a"], ["b"])


@pytest.mark.parametrize(
    "axes", [("ab", "xyz"), ("abcd", "xy", "12", "uvw"), ("abc",), ("ab", "xy", "12", "pq")], ids=str
)
def test_in_pairs_every_two_values_meet_in_few_rows(axes: tuple[str, ...]) -> None:
    parameters = pairs(*axes)
    assert [parameter.values for parameter in parameters] == list(itertools.product(*axes))
    rows = fast(parameters)
    for (one, first), (other, second) in itertools.combinations(enumerate(axes), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(first, second))
    two_longest = math.prod(sorted(map(len, axes))[-2:])
    assert len(rows) <= 1.5 * two_longest

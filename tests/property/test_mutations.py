"""Wrong plans: one random change to a right one, and `moec verify` finds it and names an op."""

import random

import pytest
from models import moe_plan
from mutations import mutate

from moec.runtime.verify import verify

DEGREES = ({}, {"ranks": 8, "tp": 2, "ep": 4})


@pytest.mark.parametrize("number", range(60))
def test_a_random_change_is_found_and_an_op_named(number: int):
    words, plan = mutate(moe_plan(**DEGREES[number % 2]), random.Random(f"test/{number}"))
    report = verify(plan, float32=False)
    assert not report.ok, words
    assert report.first_difference is not None, words

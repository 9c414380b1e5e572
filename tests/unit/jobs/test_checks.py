"""The passes in which a job checks values on the device; dtypes and shapes are always checked."""

from __future__ import annotations

import pytest
import torch
from support.plans import moe_plan

import moec
from moec.runtime.errors import JobError
from moec.runtime.guards.every_guard import first_complaint
from moec.runtime.guards.guard import PassEnds
from moec.runtime.ranks.checks import Checks

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ALONE = {"ranks": 1, "ep": 1}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("all", [True, True, True, True]), ("first", [True, False, True, False]), ("none", [False] * 4)],
)
def test_a_device_is_waited_for_as_often_as_was_asked(mode: str, expected: list[bool]) -> None:
    checks, seen = Checks(mode), set[object]()
    kinds = ("training", "training", "evaluation", "training")
    assert [checks.reads_values(seen, kind, CUDA) for kind in kinds] == expected


def test_the_cpu_is_always_looked_at_unless_nothing_is_to_be() -> None:
    for mode, expected in (("all", True), ("first", True), ("none", False)):
        seen = set[object]()
        assert [Checks(mode).reads_values(seen, "training", CPU) for _ in range(2)] == [expected] * 2


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="checks must be 'all', 'first' or 'none', not 'some'"):
        moec.launch(moe_plan(**ALONE), checks="some")


@pytest.mark.parametrize("checks", ["all", "first", "none"])
def test_dtypes_and_shapes_are_checked_whatever_is_asked(checks: str) -> None:
    with moec.launch(moe_plan(**ALONE), device="cpu", checks=checks) as job:
        model = job.build()
        for _ in range(2):
            with pytest.raises(JobError, match=r"MOE0702.*tokens are torch.int32"):
                model(torch.zeros(2, 8, dtype=torch.int32))


def test_ids_and_scores_are_looked_at_by_default_and_not_where_nothing_is_asked() -> None:
    for checks, outcome in (("first", JobError), ("none", IndexError)):
        with moec.launch(moe_plan(**ALONE), device="cpu", checks=checks) as job:
            model = job.build()
            model(torch.zeros(2, 8, dtype=torch.int64))
            with pytest.raises(outcome):
                model(torch.full((2, 8), 32))


def test_a_guard_that_waits_looks_only_where_values_are_read() -> None:
    masks = [torch.tensor([[False, True]])]
    events = (PassEnds(masks, ["layers.0.moe"], reads_values=reads_values) for reads_values in (False, True))
    complaints = list(map(first_complaint, events))
    assert [complaint and complaint.code for complaint in complaints] == [None, "MOE0708"]


def test_a_meta_model_allocates_nothing_and_is_filled_by_a_state_dict() -> None:
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    with moec.launch(moe_plan(**ALONE), device="cpu") as job:
        built, meta = job.build(seed=3), job.build("meta")
        assert all(parameter.is_meta for parameter in meta.parameters())
        meta.to_empty(device="cpu").load_state_dict(built.state_dict())
        assert torch.equal(meta(tokens).logits, built(tokens).logits)

"""The warning of a second step that adds its gradients to those of the first."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.plans import moe_plan

import moec
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job

TOKENS = torch.arange(16).view(2, 8)


def steps(job: Job, *between: bool) -> list[str]:
    """The warnings of a step and of those after it; each of `between` says whether the gradients are zeroed before."""
    model = job.build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.step(model, TOKENS[:, :-1], TOKENS[:, 1:])
        for zeroed in between:
            if zeroed:
                model.zero_grad()
            job.step(model, TOKENS[:, :-1], TOKENS[:, 1:])
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_step_onto_other_gradients_warns_once() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        (message,) = steps(job, False, False)
    assert message.startswith("the gradients of an earlier job.step are still there, and those of this one are added")


def test_steps_with_zeroed_gradients_do_not() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        assert steps(job, True, True) == []


def test_gradients_that_are_zeros_are_none() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        job.step(model, TOKENS[:, :-1], TOKENS[:, 1:])
        model.zero_grad(set_to_none=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job.step(model, TOKENS[:, :-1], TOKENS[:, 1:])


def test_gradients_that_an_error_in_the_middle_of_a_step_has_left_are_told() -> None:
    """The second of two micro-batches raises, and the script catches it."""
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model, calls = job.build(), list[int]()

        def failing(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("of the script")
            return logits.logsumexp(-1).sum()

        with pytest.raises(JobError, match="of the script"):
            job.step(model, TOKENS[:, :-1], TOKENS[:, 1:], loss=failing, microbatches=2)
        with pytest.warns(UserWarning, match="raised an error; gradients, possibly incomplete"):
            job.step(model, TOKENS[:, :-1], TOKENS[:, 1:], loss=failing)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job.step(model, TOKENS[:, :-1], TOKENS[:, 1:], loss=failing)

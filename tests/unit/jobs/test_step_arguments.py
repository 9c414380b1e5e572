"""Arguments of `job.step` and `clip_grad_norm_` that would silently do something else."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from models import layer_text, moe_plan

import moec
from moec.runtime.errors import JobError

TOKENS = torch.arange(16).view(2, 8)


def test_inputs_that_no_function_takes_are_refused() -> None:
    weights = {"weights": torch.ones(2, 8)}
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with pytest.raises(JobError, match=r"MOE0713.*got the inputs weights, but no loss, logprob_loss or count"):
            job.step(model, TOKENS, TOKENS, inputs=weights)
        assert all(parameter.grad is None for parameter in model.parameters())
        job.step(model, TOKENS, TOKENS, inputs=weights, count=lambda labels, weights: weights.sum())
        job.step(model, TOKENS, TOKENS, inputs={})


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_norm_is_a_number_from_0_on(max_norm: float) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        job.step(model, TOKENS, TOKENS)
        before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        with pytest.raises(ValueError, match=f"max_norm is a number from 0 on, not {max_norm}"):
            job.clip_grad_norm_(model, max_norm)
        assert all(torch.equal(model.get_parameter(name).grad, grad) for name, grad in before.items())
        job.clip_grad_norm_(model, 0.0)
        assert not any(parameter.grad.any() for parameter in model.parameters())
    with pytest.raises(ValueError, match="max_norm is a number from 0 on"):
        moec.clip_grad_norm_(moec.layer(layer_text(ranks=None)), max_norm)


def test_a_step_in_evaluation_warns_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build().eval()
        other = copy.deepcopy(model)
        with pytest.warns(UserWarning, match=r"job.step trains a model in eval\(\).*`model.train\(\)`") as caught:
            job.step(model, TOKENS, TOKENS)
        assert [warning.filename for warning in caught] == [__file__]
        job.step(model, TOKENS, TOKENS)
        with warnings.catch_warnings(record=True) as second:
            warnings.simplefilter("always")
            monkeypatch.setenv("RANK", "1")
            job.step(other, TOKENS, TOKENS)
        assert second == []


def test_a_step_in_training_does_not_warn() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job.step(model, TOKENS, TOKENS)

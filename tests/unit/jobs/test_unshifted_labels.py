"""The warning of labels that are the tokens themselves, from which a model would learn to repeat its input."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from support.plans import moe_plan
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.runtime.job.job import Job
from moec.runtime.job.module import PlanModule

TOKENS = torch.arange(16).view(2, 8)
WORDS = r"the labels of job\.step are its tokens.*`ids\[:, 1:\]` as labels"


def masked(place: int) -> Tensor:
    labels = TOKENS.clone()
    labels[:, place:] = -100
    return labels


@pytest.mark.parametrize("labels", [TOKENS, TOKENS.clone(), masked(5)], ids=["one tensor", "a copy", "some ignored"])
def test_labels_that_are_the_tokens_warn_once_at_the_scripts_line(labels: Tensor) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with pytest.warns(UserWarning, match=WORDS) as caught:
            job.step(model, TOKENS, labels)
        assert [warning.filename for warning in caught] == [__file__]
        model.zero_grad()
        assert not warned(lambda: job.step(model, TOKENS, labels))


def shifted(job: Job, model: PlanModule) -> None:
    job.step(model, TOKENS[:, :-1], TOKENS[:, 1:])


def one_token(job: Job, model: PlanModule) -> None:
    job.step(model, torch.full_like(TOKENS, 7), torch.full_like(TOKENS, 7))


def own_loss(job: Job, model: PlanModule) -> None:
    job.step(model, TOKENS, TOKENS, logprob_loss=lambda logprobs, labels: -logprobs.sum())


@pytest.mark.parametrize("step", [shifted, one_token, own_loss])
def test_other_labels_do_not_warn(step: Callable[[Job, PlanModule], None]) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        assert not warned(lambda: step(job, model))


def test_a_model_that_sees_what_comes_after_may_learn_its_tokens() -> None:
    with moec.launch(seeing_both_sides(), device="cpu") as job:
        model = job.build()
        assert not warned(lambda: job.step(model, TOKENS, TOKENS))


BOTH_SIDES = """
model "m" {
  vocab = 64; dim = 16; depth = 1; dtype = fp32
  layers { attention = mha(heads = 2, causal = false); moe { experts = 4 * swiglu(16); gate = topk(2) } }
}
cluster "laptop" { device = cpu; level "process" { size = 1 } }
train { batch = 2; sequence = 8 }
"""


def seeing_both_sides() -> Plan:
    return moec.compile(load_text(BOTH_SIDES).spec)


def warned(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in found]

"""Warnings of a first batch whose labels are not the next tokens, or whose sequences come first."""

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
from moec.runtime.model.module import PlanModule

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


def test_labels_shifted_twice_warn() -> None:
    """`tokens = ids[:, :-1]` with labels that were shifted already, from the end ignored or cut."""
    ids = torch.arange(20).view(2, 10)
    ignored = torch.where(ids > 11, -100, ids)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        for given in (ids, ignored):
            (said,) = warned(lambda labels=given: job.step(job.build(), ids[:, :-2], labels[:, 2:]))
            assert "the tokens after the next ones, as if shifted twice" in said


def test_sequences_in_the_first_place_warn() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1, batch=2), device="cpu") as job:
        ids = torch.randint(32, (9, 2))
        said = [each for each in warned(lambda: job.step(job.build(), ids[:-1], ids[1:])) if "tokens of" in each]
        assert said == [
            "tokens of job.step are [8, 2], and the file's batch is 2 sequences of 8 tokens for each data rank: give "
            "`[batch, sequence]`, such as `tokens.t()`"
        ]
        assert not [
            each for each in warned(lambda: job.step(job.build(), ids[1:].t(), ids[:-1].t())) if "tokens of" in each
        ]


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

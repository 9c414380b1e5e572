"""Losses of `job.step` that are means in the place of sums: one warning. Sums never warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from support.one_rank_jobs import TOKENS
from support.plans import moe_plan
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div, logsigmoid
from torch.utils.checkpoint import checkpoint

import moec
from moec.runtime.errors import JobError
from moec.runtime.guards.mean_losses import MOST_NODES

LABELS = TOKENS.flip(0)
LABELS[0, :5] = -100
VALID = LABELS != -100
WORDS = r"the function `{}` of job.step gives a mean.*`reduction='sum'`.*`count=`"


def entropy(logits: Tensor, labels: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    flat = logits.flatten(0, 1)
    return cross_entropy(flat, labels.flatten(), reduction=reduction, label_smoothing=label_smoothing)


def in_checkpoint(logits: Tensor, labels: Tensor) -> Tensor:
    return checkpoint(lambda x: entropy(x, labels, "sum") / VALID.sum(), logits, use_reentrant=False)


def of_pairs(logits: Tensor, labels: Tensor) -> Tensor:
    """As direct preference optimization: pairs of neighbours, whose log-probabilities are compared."""
    chosen, rejected = logits.log_softmax(-1)[..., 0].sum(1).view(-1, 2).unbind(1)
    return -logsigmoid(chosen - rejected).sum()


MEANS: dict[str, Callable[..., Tensor]] = {
    "reduction": entropy,
    "smoothed": lambda logits, labels: entropy(logits, labels, label_smoothing=0.1),
    "of each": lambda logits, labels: entropy(logits, labels, "none").mean(),
    "over valid labels": lambda logits, labels: entropy(logits, labels, "sum") / VALID.sum(),
    "over all labels": lambda logits, labels: entropy(logits, labels, "sum") / labels.numel(),
    "of sequences": lambda logits, labels: sum(map(entropy, logits[:, None], labels[:, None])) / len(labels),
    "negative and wide": lambda logits, labels: -logits.log_softmax(-1)[VALID].mean().double().float(),
}

SUMS: dict[str, Callable[..., Tensor]] = {
    "reduction": lambda logits, labels: entropy(logits, labels, "sum"),
    "smoothed": lambda logits, labels: entropy(logits, labels, "sum", label_smoothing=0.1),
    "of each": lambda logits, labels: entropy(logits, labels, "none").sum(),
    "mean times its number": lambda logits, labels: entropy(logits, labels) * VALID.sum(),
    "number times a mean": lambda logits, labels: int(VALID.sum()) * entropy(logits, labels),
    "of means of tokens": lambda logits, labels: logits.square().mean(-1).sum(),
    "with a mean beside": lambda logits, labels: entropy(logits, labels, "sum") + logits.square().mean(),
    "by temperature": lambda logits, labels: entropy(logits / 2, labels, "sum") / 2.0,
    "distillation": lambda logits, labels: kl_div(logits.log_softmax(-1), logits.detach().softmax(-1), reduction="sum"),
    "binary": lambda logits, labels: binary_cross_entropy_with_logits(
        logits, torch.zeros_like(logits), reduction="sum"
    ),
    "pairs": of_pairs,
    "a mean that is far away": lambda logits, labels: reduce(
        lambda loss, _: loss * 1.0, range(MOST_NODES), entropy(logits, labels)
    ),
    "in a checkpoint": in_checkpoint,  # a mean, but a look into it would compute it again
}


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_mean_warns_once_at_the_line_of_the_script(loss: Callable[..., Tensor]) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with pytest.warns(UserWarning, match=WORDS.format("loss")) as caught:
            job.step(model, TOKENS, LABELS, loss=loss)
        assert [warning.filename for warning in caught] == [__file__]
        job.step(model, TOKENS, LABELS, loss=loss)


def test_a_mean_of_log_probabilities_warns() -> None:
    warned = pytest.warns(UserWarning, match=WORDS.format("logprob_loss"))
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, warned:
        job.step(job.build(), TOKENS, LABELS, logprob_loss=lambda logprobs, labels: -logprobs.mean())


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_a_sum_does_not_warn(loss: Callable[..., Tensor]) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, warnings.catch_warnings():
        warnings.simplefilter("error")
        job.step(job.build(), TOKENS, LABELS, loss=loss)


def test_a_mean_with_a_count_of_its_own_does_not_warn() -> None:
    """`count` says what divides it: with 1, nothing does."""
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = job.build()
        loss = job.step(model, TOKENS, LABELS, loss=entropy, count=lambda labels: 1)
        model.zero_grad()
        wanted = job.step(model, TOKENS, LABELS)
        torch.testing.assert_close(loss, wanted)


def test_a_loss_of_each_token_is_told_to_be_summed() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        with pytest.raises(JobError, match=r"MOE0713.*must give a scalar tensor") as raised:
            job.step(job.build(), TOKENS, LABELS, loss=lambda logits, labels: entropy(logits, labels, "none"))
        assert "`reduction='sum'`" in raised.value.diagnostics[0].help

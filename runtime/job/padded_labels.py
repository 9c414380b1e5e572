"""Finds labels on padding, and padding that covers nearly all labels, as an inverted mask does."""

from __future__ import annotations

from torch import Tensor

from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.job.beside import Beside
from moec.runtime.job.module import PlanModule
from moec.runtime.script import warn_first

NEARLY_ALL = 0.9


def warn_of_padded(model: PlanModule, tokens: Tensor, labels: Tensor, beside: Beside) -> None:
    """Warns once per model of valid labels on padding in its first step.

    Reads values, which on a GPU waits for it: in that step alone.
    """
    if "padded labels" in model.seen or labels.shape != tokens.shape:
        return
    model.seen.add("padded labels")
    padding = padding_of(model, tokens, beside)
    if padding is None:
        return
    valid = labels != IGNORED_LABEL
    number, padded = int(valid.sum()), int((valid & padding).sum())
    if padded > NEARLY_ALL * number:
        warn_first(
            f"padding covers {padded} of the {number} valid labels of job.step: 1 marks padding, where attention masks "
            "of other libraries have 0; give `padding=1 - mask`"
        )
    elif padded:
        warn_first(
            f"{padded} of the {number} valid labels of job.step are on padding, and would be learned: give them "
            f"{IGNORED_LABEL}"
        )


def padding_of(model: PlanModule, tokens: Tensor, beside: Beside) -> Tensor | None:
    """Which tokens are padding: bool `[batch, sequence]`, or None for a model that knows none."""
    if model.takes.padding and beside.padding is not None:
        return beside.padding != 0
    return None if model.limits.padding is None else tokens == model.limits.padding

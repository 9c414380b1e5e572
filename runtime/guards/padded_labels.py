"""Finds labels on padding, and padding that covers nearly all labels, as an inverted mask does."""

from __future__ import annotations

from torch import Tensor

from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.guards.guard import BatchAgreed, Guard
from moec.runtime.script import warn_first

NEARLY_ALL = 0.9


def warn_of_padded(step: BatchAgreed) -> None:
    """Warns of valid labels on padding."""
    padding = padding_of(step)
    if padding is None or step.labels.shape != step.tokens.shape:
        return
    valid = step.labels != IGNORED_LABEL
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


def padding_of(step: BatchAgreed) -> Tensor | None:
    """The mask of padding: bool `[batch, sequence]`, or None for a model without padding."""
    if step.model.takes.padding and step.extra.padding is not None:
        return step.extra.padding != 0
    padding = step.model.limits.padding
    return None if padding is None else step.tokens == padding


GUARD = Guard(event=BatchAgreed, look=warn_of_padded, when=lambda step: not step.custom, once="padded labels")

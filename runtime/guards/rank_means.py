"""Finds a loss that is a mean over this rank's labels. Gradients are added over ranks: such a loss's are too large by
the number of ranks.

Of a loss that the script computes from `model(tokens).logits`, moec sees nothing but the gradient of the logits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moec.runtime.guards.guard import Guard, LogitsGiven
from moec.runtime.script import warn_first

CLOSE = 0.02
"""The largest relative difference between a gradient and that of a mean, for logits in bf16. The gradient of the right
loss is smaller by the number of ranks, which is at least 2."""


def watch_for_mean(event: LogitsGiven) -> None:
    """Makes the first backward through whole logits warn of a mean over this rank's labels."""
    look = partial(_look, event.logits.detach(), event.logits._version, event.data_size)
    event.logits.register_hook(look)  # type: ignore[no-untyped-call]


def _look(logits: Tensor, version: int, ranks: int, gradient: Tensor) -> None:
    changed = logits._version != version  # in place, since the forward pass: these are not the values of the gradient
    if not changed and is_mean_of_rank(logits, gradient):
        warn_first(
            f"the loss is a mean over this rank's labels; gradients are added over ranks, and will be {ranks} times "
            "too large where all ranks have equally many: divide the sum over this rank's labels by the number of "
            "labels of all ranks, or return the sum from the function of `job.step(…, loss=…)`; docs/training.md has "
            "both",
        )


def is_mean_of_rank(logits: Tensor, gradient: Tensor) -> bool:
    """Whether `gradient` is that of a mean of cross-entropies over the rows of `logits` whose gradient is not 0.

    The gradient of such a row is (softmax(logits) − onehot(label)) / count, negative at the label alone: each row tells
    the count. It looks at the rows with the largest, the middle and the smallest gradient, which differ where rows have
    weights. With one row, a mean is a sum.
    """
    values, rows = logits.flatten(0, -2), gradient.flatten(0, -2)
    sizes = torch.linalg.vector_norm(rows, dim=-1)  # without a copy of the rows
    order = sizes.argsort(descending=True)
    counted = int((sizes > 0).sum())
    if counted < 2:
        return False
    seen = (int(order[place]) for place in (0, counted // 2, counted - 1))
    return all(_is_of_count(values[row].double(), rows[row].double(), counted) for row in seen)


def _is_of_count(logits: Tensor, gradient: Tensor, count: int) -> bool:
    """Whether one row's gradient is that of its cross-entropy over `count`."""
    expected = logits.softmax(-1)
    expected[gradient.argmin()] -= 1
    scale = gradient @ expected / (expected @ expected)
    fits = (gradient - scale * expected).norm() <= CLOSE * gradient.norm()
    return bool(fits) and abs(float(scale) * count - 1) < CLOSE


GUARD = Guard(
    event=LogitsGiven, look=watch_for_mean, when=lambda event: event.data_size > 1 and event.logits.requires_grad,
    once="mean of a rank",
)  # fmt: skip

"""Finds a loss that is a mean over this rank's labels: gradients are added over ranks, so each rank's counts in full.

A loop that leaves the loss to the script (`model(tokens).logits`) shows nothing but the gradient of the logits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moec.runtime.backends import warn_first

if TYPE_CHECKING:
    from moec.runtime.job.home import Home
    from moec.runtime.job.module import PlanModule

CLOSE = 0.02
"""Relative, for logits in bf16; the gradient of the right loss is smaller by the number of ranks, at least 2."""


def watch_for_mean(model: PlanModule, logits: Tensor, home: Home) -> None:
    """In a model's first training pass, has the backward warn of a mean over this rank's labels.

    It reads values, which on a GPU waits for it: in that backward alone.
    """
    if "mean of a rank" in model.seen or not model.training or not logits.requires_grad:
        return
    model.seen.add("mean of a rank")
    if 1 < home.data_size == home.signature()["ranks"]:  # with tensor parallelism a rank has a part of the vocabulary
        logits.register_hook(partial(_look, logits.detach(), home.data_size))  # type: ignore[no-untyped-call]


def _look(logits: Tensor, ranks: int, gradient: Tensor) -> None:
    if is_mean_of_rank(logits, gradient):
        # stacklevel: the script's line, past autograd's engine, `torch.autograd.backward` and `Tensor.backward`
        warn_first(
            f"the loss is a mean over this rank's labels, and gradients are added over ranks: they are {ranks} times "
            "too large; divide the sum over this rank's labels by the labels of all ranks, or give the loss to "
            "`job.step(…, loss=…)`; docs/training.md has both",
            "RANK",
            stacklevel=6,
        )


def is_mean_of_rank(logits: Tensor, gradient: Tensor) -> bool:
    """Whether `gradient` is that of a mean of cross-entropies over the rows of `logits` whose gradient is not 0.

    The gradient of such a row is (softmax(logits) − onehot(label)) / count: one row tells the count.
    """
    rows = gradient.flatten(0, -2)
    sizes = torch.linalg.vector_norm(rows, dim=-1)  # without a copy of the rows
    counted = int((sizes > 0).sum())
    if counted < 2:
        return False
    row = int(sizes.argmax())
    found = rows[row].double()
    expected = logits.flatten(0, -2)[row].double().softmax(-1)
    expected[found.argmin()] -= 1
    scale = found @ expected / (expected @ expected)
    fits = (found - scale * expected).norm() <= CLOSE * found.norm()
    return bool(fits) and abs(float(scale) * counted - 1) < CLOSE

"""Finds losses that are means where `job.step` wants sums, in the graph that autograd has of them.

The graph is there already: no function is called again. A few numbers are read, in the first step of a model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.guards.guard import Guard, LossComputed
from moec.runtime.script import warn_first

MEAN_REDUCTION = 1
"""The number of "mean" in `at::Reduction`, which nodes of losses keep."""

STILL_A_MEAN = (
    "NegBackward", "ToCopyBackward", "ViewBackward", "SqueezeBackward", "CloneBackward", "AddBackward", "SubBackward",
)  # fmt: skip
"""Nodes whose result is a mean, or a sum of a few, if all their inputs are."""

MOST_NODES = 1000
"""A longer graph is of no simple mean."""


def warn_of_mean(loss: LossComputed) -> None:
    """Warns once per model and function if its loss, which moec will divide by the valid labels, is a mean already."""
    assert loss.summed is not None
    loss.seen.add(kind_of(loss))
    if is_mean(loss.summed, loss.labels):
        warn_first(
            f"the function `{loss.name}` of job.step gives a mean, and moec divides it by the number of valid labels "
            "once more: give a sum (`reduction='sum'`), or give `count=` what else divides it",
        )


def may_be_a_mean(loss: LossComputed) -> bool:
    """Whether moec divides this loss by its labels, and has not looked at the function before."""
    divided = loss.by_labels and loss.labels.numel() > 1 and kind_of(loss) not in loss.seen
    return divided and loss.summed is not None and loss.summed.requires_grad


def kind_of(loss: LossComputed) -> str:
    """The name in `seen`."""
    return f"mean of {loss.name}"


def is_mean(value: Tensor, labels: Tensor) -> bool:
    """Whether a scalar with a graph is a mean, or a sum of means scaled down.

    So is a sum that is divided by the number of `labels` or of the valid ones. False for whatever may be a sum: a mean
    times the number of its elements, or a mean beside a sum.
    """
    open_nodes, seen = [value.grad_fn], 0
    while open_nodes:
        node, seen = open_nodes.pop(), seen + 1
        if seen > MOST_NODES:
            return False
        if not _gives_mean(node, labels):
            before = _before(node)
            if not before or not _keeps_mean(node):
                return False
            open_nodes += before
    return True


def _before(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _gives_mean(node: Any, labels: Tensor) -> bool:
    kind = _kind(node)
    if kind == "MeanBackward":
        return bool(node._saved_self_sym_numel > 1)
    if kind == "DivBackward":
        by = _factor(node)
        return by is not None and by > 1 and by in (labels.numel(), int((labels != IGNORED_LABEL).sum()))
    return getattr(node, "_saved_reduction", None) == MEAN_REDUCTION


def _keeps_mean(node: Any) -> bool:
    kind = _kind(node)
    if kind in ("MulBackward", "DivBackward"):
        by = _factor(node)
        return by is not None and (abs(by) <= 1 if kind == "MulBackward" else abs(by) >= 1)
    return kind in STILL_A_MEAN


def _kind(node: Any) -> str:
    """The name of a node without the number of its variant."""
    name: str = node.name()
    return name.rstrip("0123456789")


def _factor(node: Any) -> float | None:
    """The number by which a node multiplies or divides its only input with a gradient; None if there is none.

    A tensor that a hook of the script's has packed is not read: that of a checkpoint would compute again.
    """
    saved = getattr(node, "_raw_saved_other", None)
    if saved is None:
        other = getattr(node, "_saved_other", None)
        return other if isinstance(other, int | float) else None
    if len(_before(node)) != 1 or getattr(saved, "unpack_hook", saved) is not None:
        return None
    other = node._saved_other
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 and not other.is_complex() else None


GUARD = Guard(event=LossComputed, look=warn_of_mean, when=may_be_a_mean)

"""Finds losses that are means where `job.step` takes sums, from their autograd graph.

No function is called again. A few numbers are read, in the first step of a model.
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
"""A graph with more nodes does not compute a simple mean."""


def warn_of_mean(loss: LossComputed) -> None:
    """Warns once per model and function if its loss, which moec will divide by the valid labels, is a mean already."""
    assert loss.summed is not None
    loss.seen.add(kind_of(loss))
    if is_mean(loss.summed, loss.labels):
        warn_first(
            f"the function `{loss.name}` of job.step gives a mean, and moec divides it by the number of valid labels "
            "once more: give a sum (`reduction='sum'`), or pass `count=`, a function that gives the number to divide "
            "by",
            stage_size=loss.stage_size,
        )


def may_be_a_mean(loss: LossComputed) -> bool:
    """Whether moec divides this loss by its labels, and has not looked at the function before."""
    divided = loss.by_labels and loss.labels.numel() > 1 and kind_of(loss) not in loss.seen
    return divided and loss.summed is not None and loss.summed.requires_grad


def kind_of(loss: LossComputed) -> str:
    """The name of a loss in `seen`."""
    return f"mean of {loss.name}"


def is_mean(value: Tensor, labels: Tensor) -> bool:
    """Whether a scalar with a graph is a mean, or a sum of means scaled down.

    A sum divided by the number of `labels` or of valid labels is a mean too. False for values that may be sums: a mean
    times the number of its elements, or a mean added to a sum.
    """
    pending, visited = [value.grad_fn], 0
    while pending:
        node, visited = pending.pop(), visited + 1
        if visited > MOST_NODES:
            return False
        if not _gives_mean(node, labels):
            inputs = _input_nodes(node)
            if not inputs or not _keeps_mean(node):
                return False
            pending += inputs
    return True


def _input_nodes(node: Any) -> list[Any]:
    return [producer for producer, _ in node.next_functions if producer is not None]


def _gives_mean(node: Any, labels: Tensor) -> bool:
    kind = _kind(node)
    if kind == "MeanBackward":
        return bool(node._saved_self_sym_numel > 1)
    if kind == "DivBackward":
        factor = _factor(node)
        return factor is not None and factor > 1 and factor in (labels.numel(), int((labels != IGNORED_LABEL).sum()))
    return getattr(node, "_saved_reduction", None) == MEAN_REDUCTION


def _keeps_mean(node: Any) -> bool:
    kind = _kind(node)
    if kind in ("MulBackward", "DivBackward"):
        factor = _factor(node)
        return factor is not None and (abs(factor) <= 1 if kind == "MulBackward" else abs(factor) >= 1)
    return kind in STILL_A_MEAN


def _kind(node: Any) -> str:
    """The name of a node without the number of its variant."""
    name: str = node.name()
    return name.rstrip("0123456789")


def _factor(node: Any) -> float | None:
    """The number by which a node multiplies or divides its only input with a gradient; None if there is none.

    A tensor that a hook of the script's has packed is not read: that of a checkpoint would compute again.
    """
    packed = getattr(node, "_raw_saved_other", None)
    if packed is None:
        factor = getattr(node, "_saved_other", None)
        return factor if isinstance(factor, int | float) else None
    if len(_input_nodes(node)) != 1 or getattr(packed, "unpack_hook", packed) is not None:
        return None
    factor = node._saved_other
    return float(factor) if isinstance(factor, Tensor) and factor.numel() == 1 and not factor.is_complex() else None


GUARD = Guard(event=LossComputed, look=warn_of_mean, when=may_be_a_mean)

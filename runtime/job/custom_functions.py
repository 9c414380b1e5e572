"""Calls of a script's own loss and count in a step. What they raise over their arguments is one error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from moec.runtime.errors import JobError
from moec.runtime.ranks.checks import Checks, Complaint

OVER_ARGUMENTS = (RuntimeError, TypeError, ValueError, IndexError)
"""What functions of torch raise for tensors of a wrong shape or dtype, and Python for a wrong number of arguments.

Their subclasses, such as `torch.OutOfMemoryError`, say something else.
"""

SUM_OF_LOGITS = (
    "`lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')` is one"
)


def result_of(
    function: Callable[..., Any], tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> tuple[Any, Exception | None]:
    """What `function(*tensors, **inputs)` returns, or what it raises over its arguments."""
    try:
        return function(*tensors.values(), **inputs), None
    except OVER_ARGUMENTS as error:
        if type(error) not in OVER_ARGUMENTS:
            raise
        return None, error


def complaint_of(
    error: Exception, name: str, gives: str, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Complaint:
    """The error of a step whose function `name`, which gives `gives`, raised `error`."""
    given = {**tensors, **inputs}
    shapes = ", ".join(f"{each} {list(tensor.shape)}" for each, tensor in given.items())
    usage = ", ".join([*tensors, *(f"{each}={each}" for each in inputs)])
    example = f"; {SUM_OF_LOGITS}" if name == "loss" else ""
    return Complaint(
        "MOE0713",
        f"the function `{name}` raised {type(error).__name__}: {str(error)[:300]}",
        f"moec calls `{name}({usage})` with {shapes}; it must give {gives}{example}",
    )


def require_with_cause(
    checks: Checks, site: str, complaint: Complaint | None, cause: Exception | None, counts: Sequence[int] = ()
) -> list[int]:
    """`checks.require`, whose error has what the script's function raised as its cause."""
    try:
        return checks.require(site, complaint, counts=counts)
    except JobError as error:
        raise error from cause

"""Calls of a script's own loss and count in a step. An error over their arguments is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from moec.runtime.errors import JobError
from moec.runtime.ranks.checks import Checks, Complaint

ARGUMENT_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
"""Errors of torch's functions for tensors of a wrong shape or dtype, and of Python for a wrong number of arguments.

Their subclasses, such as `torch.OutOfMemoryError`, have other causes.
"""

SUM_OF_LOGITS = (
    "`lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')` is one"
)


def call_user_function(
    function: Callable[..., Any], tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], *, every: bool = False
) -> tuple[Any, Exception | None]:
    """The result of `function(*tensors, **inputs)`, or the error that it raises over its arguments; `every`: any."""
    try:
        return function(*tensors.values(), **inputs), None
    except Exception as error:
        if not every and type(error) not in ARGUMENT_ERRORS:
            raise
        return None, error


def call_complaint(
    error: Exception, name: str, requirement: str, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Complaint:
    """The complaint about `error`, which the user's function `name` raised; it must give `requirement`."""
    arguments = {**tensors, **inputs}
    shapes = ", ".join(f"{argument} {list(tensor.shape)}" for argument, tensor in arguments.items())
    usage = ", ".join([*tensors, *(f"{argument}={argument}" for argument in inputs)])
    example = f"; {SUM_OF_LOGITS}" if name == "loss" else ""
    return Complaint(
        "MOE0713",
        f"the function `{name}` raised {type(error).__name__}: {str(error)[:300]}",
        f"moec calls `{name}({usage})` with {shapes}; it must give {requirement}{example}",
    )


def require_with_cause(
    checks: Checks, site: str, complaint: Complaint | None, cause: Exception | None, counts: Sequence[int] = ()
) -> list[int]:
    """`checks.require`, whose error has `cause`, the error of the script's function, as its cause."""
    try:
        return checks.require(site, complaint, counts=counts)
    except JobError as error:
        raise error from cause

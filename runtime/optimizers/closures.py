"""The closure that a script may give to an optimizer's `step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure computes, with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def has_closure(arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether these arguments of a step hook, the optimizer first, have a closure."""
    return any(argument is not None for argument in (*arguments[1:], *named.values()))

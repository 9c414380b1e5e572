"""The arithmetic behind the operators, one implementation per kind of device.

An operator checks its arguments and calls the function of its own name here. What each function takes and gives is
written at the operator, in `moec.runtime.ops`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from moec.runtime.errors import JobError

VARIABLE = "MOEC_BACKEND"
NAMES = ("torch", "triton")


_plain: ContextVar[bool] = ContextVar("plain_torch", default=False)


class BackendError(JobError):
    """`MOEC_BACKEND` asks for a backend that does not exist, or not for this device or these dtypes."""

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__("MOE0707", message, help)


class Backend(Protocol):
    """One function per operator; a module is one."""

    def rope(self, x: Tensor, theta: float) -> Tensor: ...

    def rope_backward(self, grad: Tensor, theta: float) -> Tensor: ...

    def gated(self, x: Tensor, activation: str) -> Tensor: ...

    def gated_backward(self, grad: Tensor, x: Tensor, activation: str) -> Tensor: ...

    def route(
        self, logits: Tensor, k: int, score: str, after: bool, normalize: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def route_backward(
        self,
        logits: Tensor,
        grad_probabilities: Tensor | None,
        grad_weights: Tensor | None,
        weights: Tensor,
        experts: Tensor,
        score: str,
        after: bool,
        normalize: bool,
    ) -> Tensor: ...

    def count_choices(self, experts: Tensor, num_experts: int, groups: int) -> Tensor: ...

    def count_queues(self, experts: Tensor, num_experts: int) -> Tensor: ...

    def keep_choices(self, experts: Tensor, starts: Tensor, *how: int) -> Tensor: ...

    def largest_load(self, experts: Tensor, num_experts: int) -> Tensor: ...

    def permute_dynamic(
        self, x: Tensor, experts: Tensor, places: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def queue_starts(self, counts: Tensor, groups: int) -> Tensor: ...

    def permute_padded(
        self, x: Tensor, experts: Tensor, starts: Tensor, *how: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def permute_padded_backward(self, grad: Tensor, positions: Tensor) -> Tensor: ...

    def combine_padded(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor: ...

    def combine_padded_backward(
        self, grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def switch_loss(self, probabilities: Tensor, choices: Tensor) -> Tensor: ...

    def switch_loss_backward(self, grad: Tensor, probabilities: Tensor, choices: Tensor) -> Tensor: ...

    def permute(
        self, x: Tensor, experts: Tensor, num_experts: int, some_are_none: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def permute_backward(self, grad: Tensor, positions: Tensor) -> Tensor: ...

    def expert_mlp(
        self,
        rows: Tensor,
        counts: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def expert_mlp_backward(
        self,
        grad: Tensor,
        rows: Tensor,
        hidden: Tensor,
        counts: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...

    def mixture_mlp(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def mixture_mlp_backward(
        self,
        grad: Tensor,
        x: Tensor,
        hidden: Tensor,
        counts: Tensor,
        positions: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...

    def combine(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor: ...

    def combine_backward(
        self, grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def sum_rows(self, rows: Tensor, positions: Tensor, counts: Tensor) -> Tensor: ...

    def sum_rows_backward(self, grad: Tensor, positions: Tensor, counts: Tensor, shape: Sequence[int]) -> Tensor: ...


def select(device: str) -> Backend:
    """The backend for a kind of device, "cpu" or "cuda" (which AMD's are too).

    Rendered Triton kernels on "cuda", plain torch on "cpu". `MOEC_BACKEND=torch` or `triton` forces one; on CPU tensors
    Triton needs its interpreter (`TRITON_INTERPRET=1`). Where the kernels cannot run on this machine's device, plain
    torch does the work, and one warning says so. Raises `BackendError` where what is forced cannot be had.
    """
    return _select("torch" if _plain.get() else os.environ.get(VARIABLE) or None, device)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within it, this thread's operators are the plain-torch ones, the definition, whatever is forced or fits.

    The reference of `moec verify` runs so, or else a wrong kernel would be compared with itself.
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


@lru_cache
def _select(forced: str | None, device: str) -> Backend:
    from moec.runtime.backends.torch import torch_backend

    if forced not in (None, *NAMES):
        message = f"{VARIABLE} must be one of {', '.join(NAMES)}, not {forced!r}"
        raise BackendError(message, "unset it: moec then takes what suits the device")
    if forced == "torch" or (forced is None and device == "cpu"):
        return torch_backend

    from moec.runtime.backends.triton.triton_support import complaint

    unfit = complaint(device)
    if unfit is None:
        from moec.runtime.backends.triton import triton_backend

        return triton_backend
    if forced == "triton":
        raise BackendError(f"{VARIABLE}=triton: {unfit}", f"unset it, or say {VARIABLE}=torch")
    warn_first(f"moec runs its operators in plain torch, which is slow on this device: {unfit}", "LOCAL_RANK")
    return torch_backend


def warn_first(message: str, rank: str) -> None:
    """Warns on one rank: of what the model is, on that with `RANK` 0; of a machine, on each one's first, `LOCAL_RANK`.

    Other ranks find the same and say nothing. Without torchrun every process is a first one.
    """
    if os.environ.get(rank, "0") == "0":
        warnings.warn(message, stacklevel=3)

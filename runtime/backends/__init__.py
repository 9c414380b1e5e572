"""The arithmetic behind the operators, one implementation per kind of device.

An operator checks its arguments and calls the function of its own name here. What each function takes and gives is
written at the operator, in `moec.runtime.ops`.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Protocol

from torch import Tensor

VARIABLE = "MOEC_BACKEND"
NAMES = ("torch", "triton")


class BackendError(RuntimeError):
    """`MOEC_BACKEND` asks for a backend that does not exist, or not for this device."""


class Backend(Protocol):
    """One function per operator; a module is one."""

    def rope(self, x: Tensor, theta: float) -> Tensor: ...

    def rope_backward(self, grad: Tensor, theta: float) -> Tensor: ...

    def swiglu(self, x: Tensor) -> Tensor: ...

    def swiglu_backward(self, grad: Tensor, x: Tensor) -> Tensor: ...

    def geglu(self, x: Tensor) -> Tensor: ...

    def geglu_backward(self, grad: Tensor, x: Tensor) -> Tensor: ...

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

    def permute(self, x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def permute_backward(self, grad: Tensor, positions: Tensor) -> Tensor: ...

    def expert_mlp(
        self, rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, activation: str
    ) -> tuple[Tensor, Tensor]: ...

    def expert_mlp_backward(
        self,
        grad: Tensor,
        rows: Tensor,
        hidden: Tensor,
        counts: Tensor,
        up: Tensor,
        down: Tensor,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def combine(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor: ...

    def combine_backward(
        self, grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def select(device: str) -> Backend:
    """The backend for a kind of device, "cpu" or "cuda" (which AMD's are too).

    Plain torch, until there are Triton kernels. `MOEC_BACKEND=torch` or `triton` forces one. Raises `BackendError`.
    """
    return _select(os.environ.get(VARIABLE), device)


@lru_cache
def _select(forced: str | None, device: str) -> Backend:
    from moec.runtime.backends import torch_backend

    if forced is None or forced == "torch":
        return torch_backend
    if forced == "triton":
        message = f"{VARIABLE}=triton: the Triton kernels are not supported yet; unset it, or say torch"
        raise BackendError(message)
    raise BackendError(f"{VARIABLE} must be one of {', '.join(NAMES)}, not {forced!r}")

"""The arithmetic behind the operators, one implementation per kind of device.

An operator checks its arguments and calls the backend's function of its name. The operators' docstrings in
`moec.runtime.ops` describe the arguments and results of these functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import ModuleType

from moec.codegen.kernels.tiles import LIBRARIES
from moec.runtime.errors import JobError
from moec.runtime.script import warn_first

VARIABLE = "MOEC_BACKEND"
NAMES = ("torch", "triton", *LIBRARIES)
"""A library's name means the kernels, with experts' products by that library."""


_UNSET = ""
_forced_in_block: ContextVar[str | None] = ContextVar("backend", default=_UNSET)
"""The backend that `using` forces in this thread (None: no backend); `_UNSET` outside of its blocks."""


class BackendError(JobError):
    """`MOEC_BACKEND` names a backend that does not exist, or that does not support this device or these dtypes."""

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__("MOE0707", message, help)


Backend = ModuleType
"""One function per operator, of the operator's name and arguments: `tests/unit/runtime/test_backends.py` compares.
Where an operator decides or gathers something first, the function gets what that gave."""


def select(device: str) -> Backend:
    """The backend for a kind of device, "cpu" or "cuda" (which AMD's are too).

    Rendered Triton kernels on "cuda", plain torch on "cpu". `MOEC_BACKEND=torch` or `triton` forces one, `grouped_mm`
    or `quack` the kernels with that library for experts' products; on CPU tensors Triton needs its interpreter
    (`TRITON_INTERPRET=1`). Where the kernels cannot run on this machine's device, plain torch computes, with one
    warning. Raises `BackendError` if a forced backend cannot run.
    """
    return _select(forced_backend(), device)


def forced_backend() -> str | None:
    """The backend that `using` or else `MOEC_BACKEND` forces; None if neither does."""
    forced = _forced_in_block.get()
    return os.environ.get(VARIABLE) or None if forced == _UNSET else forced


def require_known(forced: str | None) -> None:
    """Raises `BackendError` unless `forced` is None or names a backend."""
    if forced not in (None, *NAMES):
        message = f"{VARIABLE} must be one of {', '.join(NAMES)}, not {forced!r}"
        raise BackendError(message, "unset it: moec then takes what suits the device")


@contextmanager
def using(forced: str | None) -> Iterator[None]:
    """Inside the block, this thread's operators run as if `MOEC_BACKEND` were `forced`; with None, as if it were unset.

    Backward runs with forward's backend (`ops/registry.py`), whose saved tensors it reads.
    """
    token = _forced_in_block.set(forced)
    try:
        yield
    finally:
        _forced_in_block.reset(token)


def plain_torch() -> AbstractContextManager[None]:
    """Inside the block, this thread's operators run in plain torch, even if `MOEC_BACKEND` forces another backend.

    The reference of `moec verify` runs inside it; otherwise a wrong kernel would be compared with itself.
    """
    return using("torch")


@lru_cache
def _select(forced: str | None, device: str) -> Backend:
    from moec.runtime.backends.torch import torch_backend

    require_known(forced)
    if forced == "torch" or (forced is None and device == "cpu"):
        return torch_backend

    from moec.runtime.backends.triton.triton_support import complaint

    reason = complaint(device)
    if reason is None and forced == "quack":
        from moec.runtime.backends.triton.libraries.library_quack import installation_complaint

        reason = installation_complaint()
    if reason is None:
        from moec.runtime.backends.triton import triton_backend

        return triton_backend
    if forced is not None:
        raise BackendError(f"{VARIABLE}={forced}: {reason}", f"unset it, or set {VARIABLE}=torch")
    warn_first(f"moec runs its operators in plain torch, which is slow on this device: {reason}", "LOCAL_RANK")
    return torch_backend

"""From a shape to launches of its kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.codegen.kernels.kernel_shape import MAX_EXPERTS, KernelShape
from moec.runtime.backends import BackendError
from moec.runtime.backends.triton.triton_modules import module_of
from moec.runtime.script import warn_first

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}
"""The dtypes of kernels' arguments by their names in kernel shapes."""

ALIGNED = 16
"""Bytes. Kernels are compiled for pointers at multiples of it: they load 16 bytes at once."""

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def dtype_name(x: Tensor) -> str:
    """The name of a tensor's dtype in kernel shapes. Raises `BackendError` for other dtypes, and for interpreted bf16.

    The interpreter's bf16 matrix product is wrong, and it truncates where devices round (Triton 3.6 to 3.9).
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        raise BackendError("Triton's interpreter computes bf16 wrongly", "use fp32 or fp64, or set MOEC_BACKEND=torch")
    if x.dtype not in _NAMES:
        raise BackendError(f"moec has no kernels for {x.dtype}", "set MOEC_BACKEND=torch")
    return _NAMES[x.dtype]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one shape on one device."""

    module: ModuleType
    device: torch.device

    def launch(self, kernel: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Run `kernel` on the current stream; a grid without programs runs nothing."""
        if all(grid):
            with _on(self.device):
                getattr(self.module, kernel)[grid](*map(aligned, arguments), enable_fp_fusion=True, **options)

    def compile(self, kernel: str, *arguments: Any, **options: Any) -> None:
        """Compile `kernel` as `launch` would with arguments of these dtypes."""
        with _on(self.device):
            getattr(self.module, kernel).warmup(*arguments, grid=(1,), enable_fp_fusion=True, **options)

    def arguments(self, kernel: str) -> Sequence[str]:
        """The names of a kernel's arguments."""
        names: Sequence[str] = getattr(self.module, kernel).arg_names
        return names

    def blocks(self, number: int, constant: str = "BLOCK") -> tuple[int]:
        """The grid for `number` elements, `BLOCK` (or another `constant`) per program."""
        return (-(-number // getattr(self.module, constant).value),)


@cache
def kernels_of_shape(shape: KernelShape, device: torch.device) -> Kernels:
    """The kernels of a shape for a device."""
    return Kernels(module_of(shape), device)


def kernels_of(shape: KernelShape, x: Tensor) -> Kernels:
    """The kernels of a shape for the device that `x` is on."""
    return kernels_of_shape(shape, x.device)


def aligned(argument: Any) -> Any:
    """A tensor, copied if it begins inside of 16 bytes, as a slice of a flat buffer may.

    Kernels write only to tensors that operators allocate, which are aligned.
    """
    if isinstance(argument, Tensor) and argument.data_ptr() % ALIGNED:
        return argument.clone()
    return argument


def present(tensor: Tensor | None) -> tuple[Tensor, ...]:
    """An optional tensor as kernel arguments: kernels have no argument for a missing one."""
    return () if tensor is None else (tensor.contiguous(),)


@cache
def too_many(num_experts: int) -> bool:
    """Whether there are too many experts for the kernels, so that plain torch must run; warns once."""
    if num_experts <= MAX_EXPERTS:
        return False
    warn_first(
        f"moec's kernels take at most {MAX_EXPERTS} experts; a layer of {num_experts} runs in plain torch", "RANK"
    )
    return True


@cache
def no_fp64(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether plain torch must multiply float64 matrices: Triton 3.6 compiles no such product for AMD. Warns once."""
    if dtype != torch.float64 or device.type != "cuda" or torch.version.hip is None:
        return False
    warn_first("moec has no float64 kernels for AMD devices; float64 products run in plain torch", "LOCAL_RANK")
    return True


def _on(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device, not on the tensors' device.
    return torch.cuda.device(device) if device.type == "cuda" else _like_a_device()


@contextmanager
def _like_a_device() -> Iterator[None]:
    """Silences NumPy in the interpreter, which would warn that exp(1000) is inf and the maximum of NaNs is NaN."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield

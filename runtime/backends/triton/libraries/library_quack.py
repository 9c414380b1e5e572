"""Grouped products by quack (`pip install quack-kernels`): CuTe kernels for Hopper and Blackwell.

Not measured, and not run on a device yet: the arguments' layouts are those that quack 0.6.5 asserts, and with which its
kernels compile for Hopper. quack chooses its tiles without its tuner, which would measure in the middle of training and
could choose another tile at the next start. The first call of each kind compiles for some seconds. Rows past the last
offset take no part, and an expert without rows gets a gradient of zeros.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moec.runtime.backends.triton.libraries.library_grouped_mm import aligned, odd_width

PACKAGE = "quack-kernels"

OLDEST = (0, 6, 5)
"""The first version with these arguments; older ones need older compilers."""

OLDEST_CAPABILITY = 9


def complaint(device: torch.device, dtype: str, experts: int, widths: tuple[int, ...]) -> str | None:
    """Why the products of matrices of these widths cannot be computed, in one line; None where they can."""
    reason = installation_complaint()
    if reason is not None:
        return reason
    if device.type != "cuda" or torch.version.hip is not None:
        return "quack needs an NVIDIA device"
    if torch.cuda.get_device_capability(device)[0] < OLDEST_CAPABILITY:
        return f"quack's grouped products need compute capability {OLDEST_CAPABILITY}.0"
    if dtype not in ("bf16", "fp16"):
        return f"quack does not support {dtype}"
    return odd_width(dtype, widths, "quack")


@cache
def installation_complaint() -> str | None:
    """Why quack cannot be imported, in one line; None where it can."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "quack is not installed: pip install quack-kernels"
    if tuple(int(part) for part in re.findall(r"[0-9]+", version)[:3]) < OLDEST:
        return f"quack must be at least {'.'.join(map(str, OLDEST))}, and {version} is installed"
    try:
        _gemm()
    except (ImportError, OSError, RuntimeError) as error:  # a driver or compiler that its own imports miss
        return f"quack cannot be imported: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


@cache
def _gemm() -> Any:
    with warnings.catch_warnings():
        # Its imports name parts of the CuTe DSL that have moved.
        warnings.simplefilter("ignore", DeprecationWarning)
        from quack.gemm_interface import gemm
    return gemm


def times_transposed(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, K] @ matrices[e]^T, of [E, N, K] -> [R, N]."""
    return _by_rows(aligned(rows), aligned(matrices).transpose(1, 2), offsets)


def times(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, K] @ matrices[e], of [E, K, N] -> [R, N]."""
    return _by_rows(aligned(rows), aligned(matrices), offsets)


def transposed_times(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Each expert's left^T @ right, of [R, M] and [R, N] -> [E, M, N]."""
    out = left.new_empty((offsets.shape[0] - 1, left.shape[1], right.shape[1]))
    operands = aligned(left).t(), aligned(right)
    _gemm()(*operands, out=out, cu_seqlens_k=aligned(offsets), tuned=False)
    return out


def _by_rows(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, K] @ matrices[e], of [E, K, N] with either of K and N contiguous -> [R, N]."""
    out = rows.new_empty((rows.shape[0], matrices.shape[2]))
    _gemm()(rows, matrices, out=out, cu_seqlens_m=aligned(offsets), tuned=False)
    return out

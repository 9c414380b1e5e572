"""Grouped products by torch: `torch.nn.functional.grouped_mm`.

On compute capability 9 and 10 in bfloat16 it is one persistent CUTLASS kernel, and one small kernel that prepares its
arguments. Anywhere else on a device it copies the offsets to the host, waits, and loops over the experts
(aten/src/ATen/native/cuda/GroupedBlas.cpp, torch 2.13), which `complaint` refuses.

Rows past the last offset take no part: they are not read, and those of a result are left undefined. An expert without
rows gets a gradient of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moec.codegen.kernels.library_rule import MAX_EXPERTS
from moec.passes.ir.value import DTYPE_BYTES

CAPABILITIES = (9, 10)
"""Major compute capabilities with a CUTLASS kernel: Hopper, and Blackwell's data-centre devices."""


def complaint(device: torch.device, dtype: str, experts: int, widths: tuple[int, ...]) -> str | None:
    """Why the products of matrices of these widths cannot be computed, in one line; None where they can."""
    if dtype == "fp64":
        return "torch's grouped_mm does not support fp64"
    reason = _device_complaint(device, dtype) if device.type == "cuda" else None
    if reason is not None:
        return f"torch's grouped_mm is a loop that waits for the host {reason}"
    if experts > MAX_EXPERTS:
        return f"torch's grouped_mm takes at most {MAX_EXPERTS} experts, not {experts}"
    return odd_width(dtype, widths, "torch's grouped_mm")


def _device_complaint(device: torch.device, dtype: str) -> str | None:
    if torch.version.hip is not None:
        return "on AMD devices"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        return f"on compute capability {major}.{minor}"
    return None if dtype == "bf16" else f"in {dtype}"


def odd_width(dtype: str, widths: tuple[int, ...], library: str) -> str | None:
    """Why rows of these widths are not aligned to 16 bytes; None if they are."""
    multiple = 16 // DTYPE_BYTES[dtype]
    odd = next((width for width in widths if width % multiple), None)
    return None if odd is None else f"{library} needs widths that are multiples of {multiple} in {dtype}, not {odd}"


def aligned(x: Tensor) -> Tensor:
    """x, contiguous, copied if it does not begin at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def times_transposed(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, K] @ matrices[e]^T, of [E, N, K] -> [R, N]."""
    return grouped_mm(aligned(rows), aligned(matrices).transpose(1, 2), offs=offsets[1:])


def times(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, K] @ matrices[e], of [E, K, N] -> [R, N]."""
    return grouped_mm(aligned(rows), aligned(matrices), offs=offsets[1:])


def transposed_times(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Each expert's left^T @ right, of [R, M] and [R, N] -> [E, M, N]."""
    return grouped_mm(aligned(left).t(), aligned(right), offs=offsets[1:])

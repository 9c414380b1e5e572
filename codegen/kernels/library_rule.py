"""The rule for products by a library: where torch's `grouped_mm` should win by more than the passes around it cost.

Ours gather rows as they read them and activate as they write, so nothing but inputs and results moves. A library
multiplies whole tensors: rows are gathered into a copy before it, and the activation reads its result again after it.
The rule compares the time that a faster product saves with the time of those passes. Neither rate is measured by
moec yet, so a library must save `MARGIN` times what its passes cost.
"""

from __future__ import annotations

from collections.abc import Mapping

from moec.codegen.kernels.tiles import KERNELS, Kernel, Library

BANDWIDTH: Mapping[str, float] = {"h100": 3.0e12, "h200": 4.3e12}
"""Bytes per second of large copies; H200's is measured, H100's has the same ratio to its data sheet.

The rule is for these devices alone: earlier ones run `grouped_mm` as a loop that waits for the host, and on later ones
its only tile is 64 x 128 x 128 for one multiprocessor (aten/src/ATen/native/cuda/GroupMM.cu), which is unmeasured.
"""

RATE = 450e12
"""FLOP/s of a large product in Triton: from the published forward passes of Liger and ScatterMoE on H100."""

GAIN = 1.3
"""What CUTLASS's persistent product of large widths makes of `RATE` (Mixtral's layer, H200)."""

LEAST_WIDTH = 2048
"""Of dim and hidden: the gain was seen on widths above it; at 768 the passes around take 40 % of the layer."""

LIBRARY_ROWS = 128
"""Rows of its tile, which an expert's last rows are rounded up to; with fewer rows per expert it takes a slower one."""

LAUNCH = 5e-6
"""Seconds of one more launch."""

MARGIN = 3.0

WIDTH_MULTIPLE = 8
"""16 bytes in bf16, the only dtype in which `grouped_mm` is one kernel."""


def libraries_for(
    dtype: str, rows: int, experts: int, widths: tuple[int, int], gated: bool, device: str, height: int
) -> dict[Kernel, Library]:
    """The products that a library should compute, for `rows` rows in all, on a device of this name.

    `widths` are dim and hidden, `height` is the rows of our tiles. Empty for devices that the rule does not know.
    """
    bandwidth = BANDWIDTH.get(device)
    if bandwidth is None or not _fits(dtype, rows, experts, widths):
        return {}
    per_launch = LAUNCH / rows
    dim, hidden = widths
    flops = 2.0 * dim * hidden

    found: dict[Kernel, Library] = {}
    for kernel in KERNELS:
        parts = 2 if gated and kernel.startswith("up") else 1
        saved = flops * parts * _saved(kernel, rows, experts, height)
        moved, launches = _around(kernel, dim, hidden, gated, "down_backward" in found)
        if saved > MARGIN * (2 * moved / bandwidth + launches * per_launch):
            found[kernel] = "grouped_mm"
    return found


def _fits(dtype: str, rows: int, experts: int, widths: tuple[int, int]) -> bool:
    large = min(widths) >= LEAST_WIDTH and rows > experts * LIBRARY_ROWS
    return dtype == "bf16" and large and not any(width % WIDTH_MULTIPLE for width in widths)


def _saved(kernel: Kernel, rows: int, experts: int, height: int) -> float:
    """Seconds per FLOP that the library saves. A gradient of weights sums over rows, which need no rounding up."""
    if kernel.endswith("_weights"):
        return (1 - 1 / GAIN) / RATE
    ours, theirs = (1 + size / 2 * experts / rows for size in (height, LIBRARY_ROWS))
    return (ours - theirs / GAIN) / RATE


def _around(kernel: Kernel, dim: int, hidden: int, gated: bool, grad_gathered: bool) -> tuple[int, int]:
    """Numbers per row that the passes around a product read and write, and the launches that it adds.

    The product itself has one more, which prepares its arguments. With `grad_gathered`, down's backward has gathered
    the rows for the gradient of its weights; those for up are gathered again, because backward keeps no rows. Biases
    and rows from other ranks are not counted: their passes cost a product of these widths little.
    """
    match kernel:
        case "up":
            return 2 * dim + (2 if gated else 1) * hidden, 3
        case "down_backward":
            return 2 * dim + 2 * hidden, 3
        case "up_weights":
            return 2 * dim, 2
        case "down_weights" if not grad_gathered:
            return 2 * dim, 2
    return 0, 1


def reason(libraries: Mapping[Kernel, Library], widths: tuple[int, int], rows: int, experts: int) -> str:
    """Why a library computes these products, in a few words."""
    names = ", ".join(libraries)
    return f"grouped_mm for {names}: {widths[0]} x {widths[1]}, {rows // experts:,} rows per expert"

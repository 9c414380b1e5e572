"""The rule for products by a library: where torch's `grouped_mm` is faster by the model of the kernels, with passes.

Our kernels gather rows as they read and activate as they write, so they move only inputs and results. A library
multiplies whole tensors: rows are gathered into a copy before, and the activation reads the result again after it.
Large products are faster by CUTLASS than by our kernels, and wide layers have relatively cheap passes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from moec.codegen.kernels.model.model_calibration import device_model
from moec.codegen.kernels.model.model_choice import best_way
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer
from moec.codegen.kernels.tile_rule import tiles_for
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Kernel, Tile, Ways

DEVICES = ("h100", "h200")
"""Earlier devices run `grouped_mm` as a loop that waits for the host. On later ones its only tile is 64 x 128 x 128 for
one multiprocessor (aten/src/ATen/native/cuda/GroupMM.cu, 2026), not measured yet."""

MIN_HIDDEN = 2048
"""At hidden widths of 768 and 1,024, published kernels that gather are faster than those around `grouped_mm`."""

WIDTH_MULTIPLE = 8
"""16 bytes in bf16, the only dtype in which `grouped_mm` is one kernel."""

MAX_EXPERTS = 1023
"""The limit of `grouped_mm`: CUTLASS prepares one argument per thread of a block."""

MARGIN = 1.15
"""The least predicted gain of a library's product: the two fastest forms of a layer may be this close."""


def with_libraries(
    tiles: Ways, dtype: str, rows: int, experts: int, widths: tuple[int, int], gated: bool, device: str
) -> tuple[Ways, str]:
    """The rule's tiles, or `grouped_mm` where it is faster, and the predicted gains as text, empty if there are none.

    For `rows` rows in all over `experts` of a layer of `widths`, dim and hidden, on a device of this name.
    """
    dim, hidden = widths
    fits = dtype == "bf16" and hidden >= MIN_HIDDEN and not any(width % WIDTH_MULTIPLE for width in widths)
    if device not in DEVICES or not fits or experts > MAX_EXPERTS:
        return tiles, ""
    # Eight classes of rows for each power of two: an exchange brings another number of rows at each step.
    step = 1 << max(0, rows.bit_length() - 4)
    return _with_libraries(tiles, -(-rows // step) * step, experts, dim, hidden, gated, device)


@lru_cache(maxsize=1024)
def _with_libraries(
    tiles: Ways, rows: int, experts: int, dim: int, hidden: int, gated: bool, device: str
) -> tuple[Ways, str]:
    model = device_model(device)
    assert model is not None, device
    # Assumes that each row is gathered from a token of its own, as rows from other ranks are.
    layer = ExpertLayer(experts=experts, dim=dim, hidden=hidden, gated=gated, dtype="bf16", k=1)
    load, gains = Load.uniform(rows, experts, 1), {}
    for kernel in KERNELS:
        # Our kernels are persistent and read weights by TMA: `in_bulk` holds for every layer here.
        best = best_way(kernel, tiles.of(kernel), ("grouped_mm",), layer, load, model, bulk=True, margin=MARGIN)
        if best.way != tiles.of(kernel):
            gains[kernel] = best.gain
            tiles = tiles.with_way(kernel, best.way)
    texts = ", ".join(f"{kernel} {gain:.2f}" for kernel, gain in gains.items())
    return tiles, f"predicted gains of grouped_mm: {texts}" if gains else ""


def without_unfit_libraries(
    ways: Ways, dtype: str, rows: int, experts: int, widths: tuple[int, int], gated: bool, family: str
) -> Ways:
    """The ways, with the rule's tile for a library's product that no device of this family computes in one kernel."""
    one_kernel = dtype == "bf16" and family == "hopper" and experts <= MAX_EXPERTS
    if one_kernel and not any(width % WIDTH_MULTIPLE for width in widths):
        return ways
    rule = tiles_for(dtype, rows, experts, widths, gated, family)
    unfit = [kernel for kernel in KERNELS if ways.tile(kernel) is None]
    return replace(ways, **{kernel: tile_instead(rule, ways, kernel) for kernel in unfit})


def tile_instead(rule: Ways, chosen: Ways, kernel: Kernel) -> Tile:
    """The rule's tile in a library's place, as high as the chosen tiles of products of rows: they share a table."""
    tile = rule.tile(kernel)
    assert tile is not None
    shares_table = any(chosen.tile(row_kernel) for row_kernel in ROW_KERNELS)
    return replace(tile, rows=chosen.rows) if shares_table and kernel in ROW_KERNELS else tile

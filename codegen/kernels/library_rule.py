"""The rule for products by a library: where the model of the kernels has torch's `grouped_mm` win, passes included.

Ours gather rows as they read them and activate as they write, so nothing but inputs and results moves. A library
multiplies whole tensors: rows are gathered into a copy before it, and the activation reads its result again after it.
CUTLASS's product is faster than ours where it is large, and the passes around it cost less the wider the layer is.
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
one multiprocessor (aten/src/ATen/native/cuda/GroupMM.cu, 2026), which nobody measured here."""

LEAST_HIDDEN = 2048
"""At hidden widths of 768 and 1,024, published layers of kernels that gather are ahead of those around `grouped_mm`."""

WIDTH_MULTIPLE = 8
"""16 bytes in bf16, the only dtype in which `grouped_mm` is one kernel."""

MAX_EXPERTS = 1023
"""Of `grouped_mm`: CUTLASS prepares one argument per thread of a block."""

MARGIN = 1.15
"""How many times as fast as ours a library's product must be predicted: a layer's two fastest forms are that close."""


def with_libraries(
    tiles: Ways, dtype: str, rows: int, experts: int, widths: tuple[int, int], gated: bool, device: str
) -> tuple[Ways, str]:
    """The rule's tiles, or `grouped_mm` where it wins, and why it does; the reason is empty where it never does.

    For `rows` rows in all over `experts` of a layer of `widths`, dim and hidden, on a device of this name.
    """
    dim, hidden = widths
    fits = dtype == "bf16" and hidden >= LEAST_HIDDEN and not any(width % WIDTH_MULTIPLE for width in widths)
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
    # Each row is taken to be gathered from a token of its own, which is what rows from other ranks are.
    layer = ExpertLayer(experts=experts, dim=dim, hidden=hidden, gated=gated, dtype="bf16", k=1)
    load, gains = Load.uniform(rows, experts, 1), {}
    for kernel in KERNELS:
        # Ours are persistent and read weights by TMA: `in_bulk` holds for every layer that comes here.
        best = best_way(kernel, tiles.of(kernel), ("grouped_mm",), layer, load, model, bulk=True, margin=MARGIN)
        if best.way != tiles.of(kernel):
            gains[kernel] = best.gain
            tiles = tiles.with_way(kernel, best.way)
    said = ", ".join(f"{kernel} {gain:.2f}" for kernel, gain in gains.items())
    return tiles, f"predicted gains of grouped_mm: {said}" if gains else ""


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
    beside = any(chosen.tile(other) for other in ROW_KERNELS)
    return replace(tile, rows=chosen.rows) if beside and kernel in ROW_KERNELS else tile

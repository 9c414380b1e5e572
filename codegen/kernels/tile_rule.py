"""The rule for tiles: by family of devices, dtype and rows per expert.

Rows per expert decide a product's class: `few` (decoding, or very many experts), `some`, or `many`. Tiles stored for a
device and shape take precedence (`stored_tiles.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moec.codegen.kernels.tiles import KERNELS, Kernel, Tile, Ways
from moec.passes.ir.value import DTYPE_BYTES

FEW, SOME = 24, 64
"""The most rows per expert of the classes `few` and `some`.

Tiles of 64 rows waste less of an expert's last tile, which is half empty on average, but read 1.7 times as much from
L2 for each row as tiles of 128 rows, and L2 bounds both: by the kernels' model of an H200 (`model.py`, not calibrated)
128 rows win from about 50 rows per expert on. CUTLASS's grouped product in PyTorch changes at 64 too.
"""


def load_of(rows: int, experts: int) -> str:
    """The class of `rows` rows in all over `experts`: "few", "some" or "many" rows per expert."""
    rows_per_expert = -(-rows // experts)
    return "few" if rows_per_expert <= FEW else "some" if rows_per_expert <= SOME else "many"


def _ways(text: str) -> Ways:
    return Ways(*map(Tile.parse, text.split()))


# Columns: up, down, down_backward, down_weights, up_backward, up_weights.
HALF: Mapping[str, Mapping[str, Ways]] = {
    "hopper": {
        "few": _ways("16x128x128w4s3 16x128x64w4s4 16x128x64w4s4 128x128x32w8s2 16x128x64w4s4 128x128x32w8s2"),
        "some": _ways("64x256x64w4s4 64x256x64w4s4 64x256x64w4s4 128x128x32w8s3 64x256x64w4s4 128x128x32w8s3"),
        "many": _ways("128x256x64w8s4 128x256x64w8s4 128x256x64w8s4 128x256x64w8s4 128x256x64w8s4 128x256x64w8s4"),
    },
    "ampere": {
        "few": _ways("16x128x64w4s4 16x128x64w4s4 16x128x64w4s4 128x128x32w8s2 16x128x64w4s4 128x128x32w8s2"),
        "some": _ways("64x128x64w4s3 64x128x64w4s3 64x128x64w4s3 128x128x64w8s3 64x128x64w4s3 128x128x64w8s3"),
        "many": _ways("128x128x64w8s3 128x128x64w8s3 128x128x64w8s3 128x128x64w8s3 128x128x64w8s3 128x128x64w8s3"),
    },
    "cdna": {
        "few": _ways("16x128x64w4s2 16x64x64w4s2 16x64x64w4s2 64x64x64w4s2 16x64x64w4s2 64x64x64w4s2"),
        "some": _ways("64x128x64w4s2 64x128x64w4s2 64x128x64w4s2 128x128x64w8s2 64x128x64w4s2 128x128x64w8s2"),
        "many": _ways("128x128x64w4s2 128x128x64w8s2 128x128x64w8s2 128x128x64w8s2 128x128x64w8s2 128x128x64w8s2"),
    },
}
"""bf16 and fp16. Blackwell takes Hopper's.

On Hopper, a tile of 128 x 128 multiplies 64 times for each byte from L2, one of 128 x 256 85 times, which is near the
limit of an H200's L2; four buffers of it fill the shared memory of a multiprocessor. No kernel spills with these tiles.
"""

FULL: Mapping[str, Ways] = {
    "fp32": _ways("64x64x32w4s2 64x64x32w4s2 64x64x32w4s2 64x64x32w4s2 64x64x32w4s2 64x64x32w4s2"),
    "fp64": _ways("32x64x16w4s2 32x32x16w4s2 32x32x16w4s2 32x32x16w4s2 32x32x16w4s2 32x32x16w4s2"),
}
"""Full precision is for proofs, not for speed: one class."""


def tiles_for(dtype: str, rows: int, experts: int, widths: tuple[int, int], gated: bool, family: str) -> Ways:
    """The rule's tiles for `rows` rows in all, over `experts`, of a model of these two widths (dim and hidden).

    `family` is "hopper" (and what came after it), "ampere" or "cdna". No tile is wider than its matrix.
    """
    rule_tiles = FULL[dtype] if dtype in FULL else HALF[family][load_of(rows, experts)]
    tiles = {kernel: _narrowed(kernel, tile, widths, gated) for kernel in KERNELS if (tile := rule_tiles.tile(kernel))}
    if not aligned(dtype, widths) and (tile := tiles.get("down_backward")):
        # It needs the most registers: wider, with an address for each entry, a thread spills 272 bytes (Triton 3.6).
        tiles["down_backward"] = replace(tile, columns=min(tile.columns, 64))
    return replace(rule_tiles, **tiles)


def aligned(dtype: str, widths: tuple[int, int]) -> bool:
    """Whether rows of these widths are multiples of 16 bytes, which one instruction moves."""
    return all(width * DTYPE_BYTES[dtype] % 16 == 0 for width in widths)


def reason(dtype: str, rows: int, experts: int, family: str) -> str:
    """The reason for the rule's tiles, in a few words."""
    if dtype in FULL:
        return f"{dtype} has one class of tiles"
    return f"{load_of(rows, experts)} rows per expert ({-(-rows // experts):,}) on {family}"


INTERPRETER = "interpreter"
"""The device name used for CPU tensors."""


def in_bulk(dtype: str, widths: tuple[int, int], family: str, device: str = "") -> bool:
    """Whether products of rows read weights by TMA in a persistent loop: sm_90 and later, rows of 16-byte multiples.

    Only in 16 bits: persistent products of fp32 spill. The interpreter, which has no bf16, tries them in fp32.
    """
    fits = dtype in ("bf16", "fp16") or (dtype == "fp32" and device == INTERPRETER)
    return family == "hopper" and fits and aligned(dtype, widths)


def extents(kernel: Kernel, widths: tuple[int, int], gated: bool) -> tuple[int | None, int, int | None]:
    """The rows, columns and depth that a product's tiles cover; None for rows of the input, whose number varies."""
    dim, hidden = widths
    pre_activation_width = hidden * (2 if gated else 1)
    match kernel:
        case "up":
            return None, pre_activation_width, dim
        case "down":
            return None, dim, hidden
        case "down_backward":
            return None, hidden, dim
        case "down_weights":
            return dim, hidden, None
        case "up_backward":
            return None, dim, pre_activation_width
        case "up_weights":
            return pre_activation_width, dim, None


def _narrowed(kernel: Kernel, tile: Tile, widths: tuple[int, int], gated: bool) -> Tile:
    """A tile no larger than its matrix, halved while that covers the columns with over an eighth fewer columns in all,
    padding included."""
    rows, columns, depth = (
        size if extent is None else min(size, max(16, 1 << (extent - 1).bit_length()))
        for size, extent in zip((tile.rows, tile.columns, tile.depth), extents(kernel, widths, gated), strict=True)
    )
    width = extents(kernel, widths, gated)[1]
    while columns > 64 and 8 * _padded(width, columns // 2) < 7 * _padded(width, columns):
        columns //= 2
    # Three buffers of a narrower tile leave room for a second block on the multiprocessor.
    stages = tile.stages if columns == tile.columns else min(tile.stages, 3)
    return replace(tile, rows=rows, columns=columns, depth=depth, stages=stages)


def _padded(width: int, columns: int) -> int:
    return -(-width // columns) * columns

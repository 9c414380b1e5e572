"""The size of `table`: operators of experts save the order of rows in it, so that backward need not sort them again."""

from __future__ import annotations

LEAST_ROWS = 16
"""Rows of the lowest tile that kernels use."""

ALIGNED = 4
"""Each part of a table begins at a multiple of 4 int32 numbers: 16 bytes, which a kernel loads in one instruction."""


def table_parts(num_rows: int, num_experts: int) -> tuple[int, ...]:
    """The lengths of a table's parts, each rounded up to `ALIGNED`; numbers of rows may be symbolic.

    The parts are the order of the rows [R], the offsets of the experts' rows [E + 1], the number of tiles, and for
    each of at most ⌈R / 16⌉ + E tiles its expert and its first row.
    """
    tiles = -(-num_rows // LEAST_ROWS) + num_experts
    return tuple(-(-length // ALIGNED) * ALIGNED for length in (num_rows, num_experts + 1, 1, tiles, tiles))


def table_length(num_rows: int, num_experts: int) -> int:
    """The length of a table of int32 numbers."""
    return sum(table_parts(num_rows, num_experts))

"""Reads types of values: `bf16[batch, sequence, 4096] @ dp:shard(0)`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from moec.passes.ir.ir_error import UnreadableLineError, quoted
from moec.passes.ir.layout import Layout, Shard
from moec.passes.ir.limits import MAX_DIGITS, MAX_DIM, MAX_ELEMENTS, MAX_RANK
from moec.passes.ir.value import DTYPE_BYTES, SYMBOLS, Dim

_PLACED = r"[a-z_]++:[a-z]++\([a-z0-9]++\)"
LAYOUT = rf"(?:replicate|{_PLACED}(?: {_PLACED})*+)"
"""Matches a layout; `TypeReader.layout` reads it."""
TYPE = rf"[a-z0-9]++\[[a-z0-9_%., ]*+\](?: @ {LAYOUT})?+"
"""Matches a whole type; `TypeReader` reads its parts."""
_DIGITS = re.compile(rf"(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})")


@dataclass(frozen=True, slots=True)
class ReadType:
    """The fields of a Value that its printed type gives."""

    shape: tuple[Dim, ...]
    dtype: str
    layout: Layout | None
    ragged: str | None


def integer(text: str, noun: str, low: int, high: int) -> int:
    """The integer that `text` prints; `noun` names it in messages. Raises `UnreadableLineError`."""
    number = int(text) if _DIGITS.fullmatch(text) else -1
    if not low <= number <= high:
        raise UnreadableLineError(f"{noun} is {quoted(text)}, not a number from {low} to {high}")
    return number


class TypeReader:
    """Reads types over the axes of a Program's meshes. Caches by text."""

    def __init__(self, axes: Collection[str]) -> None:
        self._axes = axes
        self._known: dict[str, ReadType] = {}

    def read(self, text: str) -> ReadType:
        """The type that `text`, which matches `TYPE`, prints. Raises `UnreadableLineError`."""
        if text not in self._known:
            self._known[text] = self._read(text)
        return self._known[text]

    def _read(self, text: str) -> ReadType:
        dtype, _, shape_and_layout = text.partition("[")
        dims, _, layout = shape_and_layout.partition("]")
        if dtype not in DTYPE_BYTES:
            raise UnreadableLineError(f"there is no dtype {quoted(dtype)}")
        shape: list[Dim] = []
        ragged = None
        for dim in dims.split(", ") if dims else ():
            if dim.startswith("rows by %"):
                shape.append("rows")
                ragged = dim.removeprefix("rows by %")
            elif dim in SYMBOLS and dim != "rows":
                shape.append(dim)
            else:
                shape.append(integer(dim, "a dim", 1, MAX_DIM))
            if len(shape) > MAX_RANK:
                raise UnreadableLineError(f"a shape has more than {MAX_RANK} dims")
        if math.prod(dim for dim in shape if isinstance(dim, int)) > MAX_ELEMENTS:
            raise UnreadableLineError(f"{quoted(text)} has more than 2^60 elements")
        placed = self.layout(layout.removeprefix(" @ ")) if layout else None
        for axis, placement in placed.placements if placed else ():
            if isinstance(placement, Shard) and placement.dim >= len(shape):
                raise UnreadableLineError(f"{quoted(text)} has no dim {placement.dim} to cut over {axis}")
        return ReadType(tuple(shape), dtype, placed, ragged)

    def layout(self, text: str) -> Layout:
        """The layout that `text` prints. Raises `UnreadableLineError`."""
        try:
            layout = Layout.parse(text)
        except ValueError as error:
            raise UnreadableLineError(f"{quoted(text)} is no layout") from error
        for axis in layout.axes:
            if axis not in self._axes:
                raise UnreadableLineError(f"no mesh has an axis {quoted(axis)}")
        return layout

"""Parameters in slabs of rows: a whole model passes through bounded memory, in the order of its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moec.grammar.huggingface.rules import Piece, Rule
from moec.runtime.huggingface.moves import Local

SLAB_BYTES = 64 << 20
"""Bytes of a slab in fp32, unless one row has more."""


class Slabs:
    """Which pieces of rules a slab of a parameter needs, found without a look at every expert's."""

    def __init__(self, rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._every: dict[str, list[Rule]] = {}
        self._at: dict[str, dict[int, list[Rule]]] = {}
        for rule in rules:
            for piece in rule.pieces:
                first = _first_row(piece)
                if first is None:
                    self._every.setdefault(piece.parameter, []).append(rule)
                else:
                    self._at.setdefault(piece.parameter, {}).setdefault(first, []).append(rule)

    def of(self, name: str) -> Iterator[tuple[range, list[Rule]]]:
        """The slabs of a parameter: rows of its first dim, and the rules that have something of them."""
        for rows in slabs_of(self.shapes[name]):
            yield rows, self.rules_of(name, rows)

    def rules_of(self, name: str, rows: range) -> list[Rule]:
        """The rules that have something of these rows."""
        at = self._at.get(name, {})
        return [*self._every.get(name, ()), *(rule for row in rows for rule in at.get(row, ()))]

    def parts(self, name: str, rows: range, slab: Tensor, rule: Rule) -> dict[str, Local]:
        """The parts of a rule's parameters of which only the slab is here."""
        parts = {piece.parameter: absent(self.shapes[piece.parameter]) for piece in rule.pieces}
        shape = self.shapes[name]
        box = ((rows.start, rows.stop), *((0, dim) for dim in shape[1:])) if shape else ()
        parts[name] = Local(slab, box, shape)
        return parts


def slabs_of(shape: tuple[int, ...]) -> Iterator[range]:
    """The rows of each slab of an fp32 tensor, one row where it has no dims. A slab has at least one row."""
    num_rows = shape[0] if shape else 1
    step = max(1, SLAB_BYTES // max(1, 4 * math.prod(shape[1:])))
    for first in range(0, num_rows, step):
        yield range(first, min(first + step, num_rows))


def slab_bytes(slab: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return slab.view(-1).view(torch.uint8).numpy().data if slab.numel() else memoryview(b"")


def absent(shape: tuple[int, ...]) -> Local:
    """A part of which nothing is here."""
    return Local(torch.empty(0), tuple((0, 0) for _ in shape), shape)


def _first_row(piece: Piece) -> int | None:
    """The row of the first dim that the piece is of, where it is of one."""
    return piece.at.get(piece.axes.split()[0])

"""Parameters in blocks of rows, so that a whole model passes through bounded memory in its checkpoint's order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moec.grammar.huggingface.rules import Piece, Rule
from moec.runtime.checkpoint.format.grid import Box
from moec.runtime.huggingface.moves import LocalPart

ROW_BLOCK_BYTES = 64 << 20
"""Bytes of a block of rows in fp32, unless one row has more."""


class RulesOfRows:
    """Finds the rules of a parameter's rows without a search through the rules of all experts."""

    def __init__(self, rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._of_all_rows: dict[str, list[Rule]] = {}
        self._of_row: dict[str, dict[int, list[Rule]]] = {}
        for rule in rules:
            for piece in rule.pieces:
                first = _first_row(piece)
                if first is None:
                    self._of_all_rows.setdefault(piece.parameter, []).append(rule)
                else:
                    self._of_row.setdefault(piece.parameter, {}).setdefault(first, []).append(rule)

    def rules(self, name: str, rows: range) -> list[Rule]:
        """The rules whose tensors have elements of these rows of a parameter."""
        of_row = self._of_row.get(name, {})
        return [*self._of_all_rows.get(name, ()), *(rule for row in rows for rule in of_row.get(row, ()))]

    def parts(self, name: str, rows: range, block: Tensor, rule: Rule) -> dict[str, LocalPart]:
        """The parts of a rule's parameters if only `block`, rows of the parameter `name`, is in memory."""
        parts = {piece.parameter: absent(self.shapes[piece.parameter]) for piece in rule.pieces}
        parts[name] = LocalPart(block, box_of_rows(self.shapes[name], rows), self.shapes[name])
        return parts


def row_blocks(shape: tuple[int, ...]) -> Iterator[range]:
    """The rows of each block of an fp32 tensor. A block has at least one row; a 0-d tensor counts as one row."""
    num_rows = shape[0] if shape else 1
    step = max(1, ROW_BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
    for first in range(0, num_rows, step):
        yield range(first, min(first + step, num_rows))


def box_of_rows(shape: tuple[int, ...], rows: range) -> Box:
    """The box of rows of a tensor; the whole box of a 0-d tensor."""
    return ((rows.start, rows.stop), *((0, dim) for dim in shape[1:])) if shape else ()


def bytes_of(block: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return block.view(-1).view(torch.uint8).numpy().data if block.numel() else memoryview(b"")


def absent(shape: tuple[int, ...]) -> LocalPart:
    """An empty part of a parameter of `shape`."""
    return LocalPart(torch.empty(0), tuple((0, 0) for _ in shape), shape)


def _first_row(piece: Piece) -> int | None:
    """The only row of the first dim that has elements of the piece; None if every row has some."""
    return piece.at.get(piece.axes.split()[0])

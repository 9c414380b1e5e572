"""A rule's pieces as pairs of views of equal shapes, a part of a parameter and its place in a tensor of Hugging Face.

Loading copies from the tensor to the part, saving from the part to the tensor. Nothing is added or multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moec.grammar.huggingface.rules import ONE, Piece, Rule

Box = Sequence[tuple[int, int]]
"""From and to, of each dim of a whole parameter."""


@dataclass(frozen=True, slots=True)
class Local:
    """A part of a parameter: its elements, the box of the whole that they are, and the whole's shape."""

    part: Tensor
    box: Box
    shape: tuple[int, ...]


def pairs(rule: Rule, tensor: Tensor, parts: Mapping[str, Local]) -> Iterator[tuple[Tensor, Tensor]]:
    """(a view of a part, the view of `tensor` that it equals) for the pieces of which this rank has something.

    `tensor` has the rule's shape. `parts` has a part of every parameter of the rule, one with an empty box where this
    rank has nothing of it.
    """
    axes = rule.axes
    sizes = rule.sizes({piece.parameter: parts[piece.parameter].shape for piece in rule.pieces})
    by_axes = tensor.view([sizes[axis] for axis in axes])
    start = 0
    for piece in rule.pieces:
        local, theirs = parts[piece.parameter], by_axes
        if rule.along:
            length = local.shape[piece.axes.split().index(rule.along)]
            theirs = by_axes.narrow(axes.index(rule.along), start, length)
            start += length
        found = _of_piece(piece, local, theirs, axes)
        if found is not None:
            yield found


def _of_piece(piece: Piece, local: Local, whole: Tensor, axes: Sequence[str]) -> tuple[Tensor, Tensor] | None:
    """The piece's part in this rank and in the tensor, or None where this rank has nothing of it."""
    index: list[int | slice] = []
    cut: dict[str, tuple[int, int]] = {}
    for axis, (first, last) in zip(piece.axes.split(), local.box, strict=True):
        if first == last:
            return None
        if axis in piece.at:
            if not first <= piece.at[axis] < last:
                return None
            index.append(piece.at[axis] - first)
        else:
            index.append(slice(None))
            cut[axis] = first, last
    kept = [axis for axis in axes if axis != ONE]
    theirs = whole.view([size for axis, size in zip(axes, whole.shape, strict=True) if axis != ONE])
    for number, axis in enumerate(kept):
        first, last = cut[axis]
        theirs = theirs.narrow(number, first, last - first)
    return local.part[tuple(index)], theirs.permute([kept.index(axis) for axis in piece.free])

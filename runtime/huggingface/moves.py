"""Pairs of views of equal shapes for a rule's pieces: one of a parameter's part, one of a Hugging Face tensor.

Loading copies from the tensor to the part, saving from the part to the tensor. Neither computes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moec.grammar.huggingface.rules import ONE, Piece, Rule
from moec.runtime.checkpoint.format.grid import Box


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A part of a parameter: its elements, their box in the whole parameter, and the whole's shape."""

    part: Tensor
    box: Box
    shape: tuple[int, ...]


def pairs(rule: Rule, tensor: Tensor, parts: Mapping[str, LocalPart]) -> Iterator[tuple[Tensor, Tensor]]:
    """(view of a part, view of `tensor` with the same elements) for each of the rule's pieces that `parts` overlap.

    `tensor` has the rule's shape. `parts` has a part of every parameter of the rule, perhaps with an empty box.
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
        if (views := _views_of_piece(piece, local, theirs, axes)) is not None:
            yield views


def _views_of_piece(piece: Piece, local: LocalPart, whole: Tensor, axes: Sequence[str]) -> tuple[Tensor, Tensor] | None:
    """The views of the piece in the local part and in the tensor `whole`; None if the part has nothing of the piece."""
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

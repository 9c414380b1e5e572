"""Emits the ops of images."""

from __future__ import annotations

import torch

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
END = 2**63 - 1
"""The end of a slice that goes to the end of its dim."""


def _patch_numbers(e: Emitter, op: Op) -> None:
    """Counts one pixel of each patch, so that the graph names no device."""
    assert isinstance(op, o.PatchNumbers)
    pixels = e.call(op, aten.select.int, *e.refs(op), 1, 0)
    for dim in (1, 2):
        pixels = e.call(op, aten.slice.Tensor, pixels, dim, 0, END, op.size)
    ones = e.call(op, aten.ones_like.default, e.call(op, aten.flatten.using_ints, pixels, 1, 2), dtype=torch.int64)
    if op.first:
        ones = e.call(op, aten.cat.default, [e.call(op, aten.slice.Tensor, ones, 1, 0, 1), ones], 1)
    e.result(op, aten.sub.Scalar, e.call(op, aten.cumsum.default, ones, 1), 1)


def _patch_embed(e: Emitter, op: Op) -> None:
    """One matrix product over the unfolded patches, each with its channels, then its rows."""
    images, weight, *class_token = e.refs(op)
    size = e.shape(op.operands[1])[-1]
    rows = e.call(op, aten.unfold.default, e.call(op, aten.type_as.default, images, weight), 2, size, size)
    grid = e.call(op, aten.unfold.default, rows, 3, size, size)  # [batch, channels, row, column, size, size]
    patches = e.call(op, aten.permute.default, grid, [0, 2, 3, 1, 4, 5])
    for start, end in ((3, 5), (1, 2)):
        patches = e.call(op, aten.flatten.using_ints, patches, start, end)
    weight = e.call(op, aten.flatten.using_ints, weight, 1, 3)
    if not class_token:
        e.result(op, aten.linear.default, patches, weight)
        return
    projected = e.call(op, aten.linear.default, patches, weight)
    like = e.call(op, aten.zeros_like.default, e.call(op, aten.slice.Tensor, projected, 1, 0, 1))
    e.result(op, aten.cat.default, [e.call(op, aten.add.Tensor, like, *class_token), projected], 1)


def _grid_windows(e: Emitter, op: Op) -> None:
    """Numbers windows by rows. A row has one window more than fit into the grid's side, for shifted windows."""
    assert isinstance(op, o.GridWindows)
    (v,) = e.refs(op)
    tokens = e.call(op, aten.select.int, e.call(op, aten.select.int, v, 3, 0), 2, 0)
    ones = e.call(op, aten.ones_like.default, tokens, dtype=torch.int64)
    places = e.call(op, aten.sub.Scalar, e.call(op, aten.cumsum.default, ones, 1), 1)
    row = e.call(op, aten.floor_divide.Scalar, places, op.side)
    column = e.call(op, aten.remainder.Scalar, places, op.side)
    numbers = []
    for place in (row, column):
        shifted = e.call(op, aten.add.Scalar, place, op.size - op.shift)
        numbers.append(e.call(op, aten.floor_divide.Scalar, shifted, op.size))
    row_start = e.call(op, aten.mul.Scalar, numbers[0], op.side // op.size + 1)
    e.result(op, aten.add.Tensor, row_start, numbers[1])


def _mean_tokens(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.MeanTokens)
    e.result(op, aten.div.Scalar, e.call(op, aten.sum.dim_IntList, *e.refs(op), [1]), op.length)


def _first_token(e: Emitter, op: Op) -> None:
    e.result(op, aten.select.int, *e.refs(op), 1, 0)


def _classify(e: Emitter, op: Op) -> None:
    e.result(op, aten.linear.default, *e.refs(op))


IMAGES: Emissions = {
    o.Classify: _classify,
    o.FirstToken: _first_token,
    o.GridWindows: _grid_windows,
    o.MeanTokens: _mean_tokens,
    o.PatchEmbed: _patch_embed,
    o.PatchNumbers: _patch_numbers,
}

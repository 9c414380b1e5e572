"""Emits the ops on packed texts: segments, positions, and counts within segments."""

from __future__ import annotations

import torch
from torch import fx

from moec.codegen.emit.emit_tokens import real_column
from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _segments(e: Emitter, op: Op) -> None:
    """Numbers segments by the separators before a token."""
    assert isinstance(op, o.Segments)
    (ids,) = e.refs(op)
    ends = e.call(op, aten.to.dtype, e.call(op, aten.eq.Scalar, ids, op.separator), torch.int64)
    segments = e.call(op, aten.sub.Tensor, e.call(op, aten.cumsum.default, ends, 1), ends)
    places, starts = _runs(e, op, segments, 1)
    e.set_results(op, segments, e.call(op, aten.sub.Tensor, places, starts))


def _number_segments(e: Emitter, op: Op) -> None:
    """A segment starts at place 0, and where a number differs from the number before it."""
    (numbers,) = e.refs(op)
    places, starts = _runs(e, op, numbers, 1)
    is_start = e.call(op, aten.to.dtype, e.call(op, aten.eq.Tensor, places, starts), torch.int64)
    segments = e.call(op, aten.sub.Scalar, e.call(op, aten.cumsum.default, is_start, 1), 1)
    e.set_results(op, segments, e.call(op, aten.sub.Tensor, places, starts))


def _runs(e: Emitter, op: Op, numbers: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
    """The place of each number along `dim`, and the place where its run of equal numbers starts."""
    places = _from_zero(e, op, numbers, dim)
    previous = e.call(op, aten.roll.default, numbers, [1], [dim])
    is_start = e.call(op, aten.logical_or.default, e.call(op, aten.ne.Tensor, numbers, previous), _is(e, op, places, 0))
    start_places = e.call(op, aten.where.ScalarOther, is_start, places, 0)
    return places, e.item(op, e.call(op, aten.cummax.default, start_places, dim), 0)


def _from_zero(e: Emitter, op: Op, like: fx.Node, dim: int) -> fx.Node:
    """0, 1, … along `dim`."""
    counted = e.call(op, aten.cumsum.default, e.call(op, aten.ones_like.default, like), dim)
    return e.call(op, aten.sub.Scalar, counted, 1)


def _is(e: Emitter, op: Op, x: fx.Node, number: int) -> fx.Node:
    return e.call(op, aten.eq.Scalar, x, number)


def _keep_in_segments(e: Emitter, op: Op) -> None:
    """Keeps a choice if its place in the queue of its segment and expert is below the expert's capacity."""
    assert isinstance(op, o.KeepInSegments)
    operands = op.named(e.refs(op))
    experts, segments = operands["experts"], operands["segments"]
    chosen = e.call(op, aten.ge.Scalar, experts, 0)
    place = _place_in_queue(e, op, experts, segments, chosen)
    k = e.value(op.operands[0]).shape[-1]
    assert isinstance(k, int)
    zeros, ones = (e.call(op, kind.default, segments) for kind in (aten.zeros_like, aten.ones_like))
    by_segment = e.call(op, aten.scatter_add.default, zeros, 1, segments, ones)
    tokens = e.call(op, aten.gather.default, by_segment, 1, segments)

    def capacity(parts: int, whole: int) -> fx.Node:
        negative = e.call(op, aten.mul.Scalar, tokens, -parts * k)
        rounded = e.call(op, aten.floor_divide.Scalar, negative, whole * op.num_experts)
        return e.call(op, aten.clamp_min.default, e.call(op, aten.neg.default, rounded), op.least)

    limit = capacity(op.parts, op.whole)
    if "training" in operands:
        in_evaluation = capacity(op.eval_parts, op.eval_whole)
        extra = e.call(op, aten.mul.Tensor, e.call(op, aten.sub.Tensor, limit, in_evaluation), operands["training"])
        limit = e.call(op, aten.add.Tensor, in_evaluation, extra)
    fits = e.call(op, aten.lt.Tensor, place, e.call(op, aten.unsqueeze.default, limit, -1))
    e.result(op, aten.where.ScalarOther, e.call(op, aten.logical_and.default, fits, chosen), experts, -1)


def _place_in_queue(e: Emitter, op: Op, experts: fx.Node, segments: fx.Node, chosen: fx.Node) -> fx.Node:
    """The number of earlier choices of the same expert in the same segment, [batch, sequence, k].

    Choices are sorted by queue; the sort is stable, and within a queue first choices come before second ones.
    """
    assert isinstance(op, o.KeepInSegments)
    sequences = e.call(op, aten.mul.Scalar, _from_zero(e, op, segments, 0), _MOST_SEGMENTS)
    queues = e.call(op, aten.mul.Scalar, e.call(op, aten.add.Tensor, sequences, segments), op.num_experts)
    queue = e.call(op, aten.add.Tensor, e.call(op, aten.unsqueeze.default, queues, -1), experts)
    by_choice = e.call(op, aten.transpose.int, e.call(op, aten.where.ScalarOther, chosen, queue, -1), 1, 2)
    flat = e.call(op, aten.flatten.using_ints, by_choice, 0, 2)
    order = e.call(op, aten.argsort.stable, flat, stable=True, dim=0)
    places, starts = _runs(e, op, e.call(op, aten.gather.default, flat, 0, order), 0)
    ranks = e.call(op, aten.sub.Tensor, places, starts)
    places_in_queue = e.call(op, aten.scatter.src, e.call(op, aten.zeros_like.default, flat), 0, order, ranks)
    return e.call(op, aten.transpose.int, e.call(op, aten.view_as.default, places_in_queue, by_choice), 1, 2)


_MOST_SEGMENTS = 1 << 32
"""An upper bound of the segments of a sequence."""


def _count_in_segments(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountInSegments)
    experts, segments = e.refs(op)
    column = e.call(op, aten.unsqueeze.default, segments, -1)
    zeros = e.call(op, aten.zeros_like.default, e.call(op, aten.expand.default, column, [-1, -1, op.num_experts]))
    known = e.call(op, aten.clamp_min.default, experts, 0)
    bins = e.call(op, aten.add.Tensor, e.call(op, aten.mul.Scalar, column, op.num_experts), known)
    counted = e.call(op, aten.to.dtype, e.call(op, aten.ge.Scalar, experts, 0), torch.int64)
    flat, bins, counted = (e.call(op, aten.flatten.using_ints, x, 1, 2) for x in (zeros, bins, counted))
    e.result(op, aten.view_as.default, e.call(op, aten.scatter_add.default, flat, 1, bins, counted), zeros)


def _segment_loss(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.SegmentLoss)
    operands = op.named(e.refs(op))
    probabilities, choices = operands["probabilities"], operands["choices"]
    if "real" in operands:
        probabilities = e.call(op, aten.where.ScalarOther, real_column(e, op, operands["real"]), probabilities, 0)
    experts = e.value(op.operands[1]).shape[-1]
    total = e.call(op, aten.clamp_min.default, e.call(op, aten.sum.dim_IntList, choices, [-1], True), 1)
    scaled = e.call(op, aten.mul.Scalar, e.call(op, aten.to.dtype, choices, e.dtype(op.results[0].dtype)), experts)
    fractions = e.call(op, aten.div.Tensor, scaled, total)
    column = e.call(op, aten.unsqueeze.default, operands["segments"], -1)
    by_token = e.call(op, aten.gather.default, fractions, 1, e.call(op, aten.expand_as.default, column, probabilities))
    e.result(op, aten.sum.default, e.call(op, aten.mul.Tensor, probabilities, by_token))


SEGMENTS: Emissions = {
    o.CountInSegments: _count_in_segments,
    o.KeepInSegments: _keep_in_segments,
    o.NumberSegments: _number_segments,
    o.SegmentLoss: _segment_loss,
    o.Segments: _segments,
}

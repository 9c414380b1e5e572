"""Emits the loss over a whole or a sharded vocabulary, and the divisors of losses."""

from __future__ import annotations

import torch

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op, Shard
from moec.passes.ir import ops as o
from moec.passes.ir.ops.vocabulary_ops import VOCABULARY
from moec.passes.ir.roles import IGNORED_LABEL

aten = torch.ops.aten

SUM = 2
"""`reduction` of `aten.cross_entropy_loss`."""


def _cross_entropy(e: Emitter, op: Op) -> None:
    logits, labels = e.refs(op)
    last = len(e.value(op.operands[1]).shape) - 1  # labels [batch, sequence], or [batch] of images
    flat = e.call(op, aten.flatten.using_ints, logits, 0, last)
    dtype = op.results[0].dtype
    if e.value(op.operands[0]).dtype != dtype:
        flat = e.call(op, aten.to.dtype, flat, e.dtype(dtype))
    targets = e.call(op, aten.flatten.using_ints, labels, 0, last)
    e.result(op, aten.cross_entropy_loss.default, flat, targets, None, SUM, IGNORED_LABEL, 0.0)


def _widen(e: Emitter, op: Op) -> None:
    e.result(op, aten.to.dtype, *e.refs(op), e.dtype(op.results[0].dtype))


def _logit_max(e: Emitter, op: Op) -> None:
    (logits,) = e.refs(op)
    largest = e.call(op, aten.amax.default, e.call(op, aten.detach.default, logits), [-1])
    e.result(op, aten.detach.default, largest)


def _sum_exp(e: Emitter, op: Op) -> None:
    logits, largest = e.refs(op)
    below = e.call(op, aten.sub.Tensor, logits, e.call(op, aten.unsqueeze.default, largest, -1))
    e.result(op, aten.sum.dim_IntList, e.call(op, aten.exp.default, below), [-1])


def _label_logit(e: Emitter, op: Op) -> None:
    layout = e.value(op.operands[0]).layout
    assert layout is not None
    (axis,) = (axis for axis, placement in layout.placements if placement == Shard(VOCABULARY))
    e.result(op, torch.ops.moec.label_logit.default, *e.refs(op), e.group(axis))


def _cross_entropy_of_sums(e: Emitter, op: Op) -> None:
    sums, largest, label_logit, labels = e.refs(op)
    total = e.call(op, aten.add.Tensor, e.call(op, aten.log.default, sums), largest)
    losses = e.call(op, aten.sub.Tensor, total, label_logit)
    valid = e.call(op, aten.ne.Scalar, labels, IGNORED_LABEL)
    e.result(op, aten.sum.default, e.call(op, aten.mul.Tensor, losses, valid))


def _count_labels(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountLabels)
    (labels,) = e.refs(op)
    if op.valid_only:
        counted = e.call(op, aten.ne.Scalar, labels, IGNORED_LABEL)
    else:
        counted = e.call(op, aten.ones_like.default, labels)
    e.result(op, aten.sum.default, counted)


def _mean(e: Emitter, op: Op) -> None:
    total, count = e.refs(op)
    e.result(op, aten.div.Tensor, total, e.call(op, aten.clamp_min.default, count, 1))


LOSS: Emissions = {
    o.CountLabels: _count_labels,
    o.CrossEntropy: _cross_entropy,
    o.CrossEntropyOfSums: _cross_entropy_of_sums,
    o.LabelLogit: _label_logit,
    o.LogitMax: _logit_max,
    o.Mean: _mean,
    o.SumExp: _sum_exp,
    o.Widen: _widen,
}

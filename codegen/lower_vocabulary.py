"""What the loss is in operators, of a vocabulary that is whole and of one that is sharded."""

from __future__ import annotations

from collections.abc import Callable

from moec.codegen.emitter import BlockEmitter
from moec.codegen.graph import DTypeLiteral
from moec.passes.ir import Op, Shard
from moec.passes.ir import ops as o
from moec.passes.ir.ops.vocabulary import VOCABULARY as VOCABULARY_DIM

IGNORED_LABEL = -100
SUM = 2
"""`reduction` of `aten.cross_entropy_loss`."""


def _cross_entropy(e: BlockEmitter, op: Op) -> None:
    logits, labels = e.refs(op)
    flat = e.step(op, "logits", "aten.flatten.using_ints", logits, 0, 1)
    dtype = op.results[0].dtype
    if e.block.scope[op.operands[0]].dtype != dtype:
        flat = e.step(op, "wide", "aten.to.dtype", flat, _literal(dtype))
    targets = e.step(op, "labels", "aten.flatten.using_ints", labels, 0, 1)
    e.result(op, "aten.cross_entropy_loss.default", flat, targets, None, SUM, IGNORED_LABEL, 0.0)


def _widen(e: BlockEmitter, op: Op) -> None:
    (logits,) = e.refs(op)
    e.result(op, "aten.to.dtype", logits, _literal(op.results[0].dtype))


def _literal(dtype: str | None) -> DTypeLiteral:
    return DTypeLiteral.model_validate({"dtype": dtype})


def _logit_max(e: BlockEmitter, op: Op) -> None:
    (logits,) = e.refs(op)
    largest = e.step(op, "of", "aten.amax.default", e.step(op, "logits", "aten.detach.default", logits), (-1,))
    e.result(op, "aten.detach.default", largest)


def _sum_exp(e: BlockEmitter, op: Op) -> None:
    logits, largest = e.refs(op)
    highest = e.step(op, "highest", "aten.unsqueeze.default", largest, -1)
    below = e.step(op, "below", "aten.sub.Tensor", logits, highest)
    e.result(op, "aten.sum.dim_IntList", e.step(op, "exp", "aten.exp.default", below), (-1,))


def _label_logit(e: BlockEmitter, op: Op) -> None:
    logits, labels = e.refs(op)
    layout = e.block.scope[op.operands[0]].layout
    assert layout is not None
    (axis,) = (axis for axis, placement in layout.placements if placement == Shard(VOCABULARY_DIM))
    e.result(op, "moec.label_logit.default", logits, labels, e.group(axis))


def _cross_entropy_of_sums(e: BlockEmitter, op: Op) -> None:
    sums, largest, label_logit, labels = e.refs(op)
    log = e.step(op, "log", "aten.log.default", sums)
    total = e.step(op, "total", "aten.add.Tensor", log, largest)
    each = e.step(op, "each", "aten.sub.Tensor", total, label_logit)
    valid = e.step(op, "valid", "aten.ne.Scalar", labels, IGNORED_LABEL)
    e.result(op, "aten.sum.default", e.step(op, "counted", "aten.mul.Tensor", each, valid))


VOCABULARY: dict[type[Op], Callable[[BlockEmitter, Op], None]] = {
    o.CrossEntropy: _cross_entropy,
    o.CrossEntropyOfSums: _cross_entropy_of_sums,
    o.LabelLogit: _label_logit,
    o.LogitMax: _logit_max,
    o.SumExp: _sum_exp,
    o.Widen: _widen,
}

"""What the loss is in operators, of a vocabulary that is whole and of one that is sharded."""

from __future__ import annotations

from collections.abc import Callable

from moec.codegen.emitter import BlockEmitter
from moec.codegen.graph import DTypeLiteral, Ref
from moec.passes.ir import Op, Shard
from moec.passes.ir import ops as o
from moec.passes.ir.ops.vocabulary import VOCABULARY as VOCABULARY_DIM

IGNORED_LABEL = -100
SUM = 2
"""`reduction` of `aten.cross_entropy_loss`."""


def _wide(e: BlockEmitter, op: Op, x: Ref, suffix: str) -> Ref:
    """x, of the op's first operand's dtype, in that of its result."""
    dtype = op.results[0].dtype
    if e.block.scope[op.operands[0]].dtype == dtype:
        return x
    return e.step(op, suffix, "aten.to.dtype", x, DTypeLiteral.model_validate({"dtype": dtype}))


def _cross_entropy(e: BlockEmitter, op: Op) -> None:
    logits, labels = e.refs(op)
    flat = _wide(e, op, e.step(op, "logits", "aten.flatten.using_ints", logits, 0, 1), "wide")
    targets = e.step(op, "labels", "aten.flatten.using_ints", labels, 0, 1)
    e.result(op, "aten.cross_entropy_loss.default", flat, targets, None, SUM, IGNORED_LABEL, 0.0)


def _logit_max(e: BlockEmitter, op: Op) -> None:
    (logits,) = e.refs(op)
    largest = e.step(op, "of", "aten.amax.default", e.step(op, "logits", "aten.detach.default", logits), (-1,))
    if e.block.scope[op.operands[0]].dtype == op.results[0].dtype:
        e.result(op, "aten.detach.default", largest)
    else:
        dtype = DTypeLiteral.model_validate({"dtype": op.results[0].dtype})
        e.result(op, "aten.to.dtype", largest, dtype)


def _sum_exp(e: BlockEmitter, op: Op) -> None:
    logits, largest = e.refs(op)
    highest = e.step(op, "highest", "aten.unsqueeze.default", largest, -1)
    below = e.step(op, "below", "aten.sub.Tensor", _wide(e, op, logits, "wide"), highest)
    e.result(op, "aten.sum.dim_IntList", e.step(op, "exp", "aten.exp.default", below), (-1,))


def _label_logit(e: BlockEmitter, op: Op) -> None:
    logits, labels = e.refs(op)
    layout = e.block.scope[op.operands[0]].layout
    assert layout is not None
    (axis,) = (axis for axis, placement in layout.placements if placement == Shard(VOCABULARY_DIM))
    picked = ("moec.label_logit.default", logits, labels, e.group(axis))
    if e.block.scope[op.operands[0]].dtype == op.results[0].dtype:
        e.result(op, *picked)
    else:
        dtype = DTypeLiteral.model_validate({"dtype": op.results[0].dtype})
        e.result(op, "aten.to.dtype", e.step(op, "picked", *picked), dtype)


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
}

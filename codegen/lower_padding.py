"""What the ops that tell padding from real tokens are in operators, and the balance terms that leave padding out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moec.codegen.emitter import BlockEmitter
from moec.codegen.graph import DTypeLiteral, Ref
from moec.passes.ir import Op
from moec.passes.ir import ops as o


def _real_tokens(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.RealTokens)
    real = e.step(op, "mask", "aten.ne.Scalar", *e.refs(op), op.padding)
    e.result(op, "aten.to.dtype", real, DTypeLiteral(dtype="int64"))


def _count_real_tokens(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.CountRealTokens)
    e.result(op, "aten.sum.default", e.step(op, "mask", "aten.ne.Scalar", *e.refs(op), op.padding))


def _mask_choices(e: BlockEmitter, op: Op) -> None:
    experts, real = e.refs(op)
    e.result(op, "aten.where.ScalarOther", _column(e, op, real), experts, -1)


def _switch_loss(e: BlockEmitter, op: Op) -> None:
    probabilities, choices, *real = e.refs(op)
    if real:
        probabilities = e.step(op, "p", "aten.where.ScalarOther", _column(e, op, *real), probabilities, 0)
    e.result(op, "moec.switch_loss.default", probabilities, choices)


def _z_loss(e: BlockEmitter, op: Op) -> None:
    logits, *real = e.refs(op)
    terms = e.step(op, "square", "aten.square.default", e.step(op, "lse", "aten.logsumexp.default", logits, (-1,)))
    e.result(op, "aten.sum.default", _of_real_tokens(e, op, terms, real))


def _of_real_tokens(e: BlockEmitter, op: Op, terms: Ref, real: Sequence[Ref]) -> Ref:
    """Terms [batch, sequence], 0 for padding; a selection, so that no number of a padding token gets through."""
    if not real:
        return terms
    return e.step(op, "real", "aten.where.ScalarOther", _mask(e, op, *real), terms, 0)


def _mask(e: BlockEmitter, op: Op, real: Ref) -> Ref:
    return e.step(op, "mask", "aten.ne.Scalar", real, 0)


def _column(e: BlockEmitter, op: Op, real: Ref) -> Ref:
    """Which tokens are real, [batch, sequence, 1]."""
    return e.step(op, "column", "aten.unsqueeze.default", _mask(e, op, real), -1)


PADDING: dict[type[Op], Callable[[BlockEmitter, Op], None]] = {
    o.CountRealTokens: _count_real_tokens,
    o.MaskChoices: _mask_choices,
    o.RealTokens: _real_tokens,
    o.SwitchLoss: _switch_loss,
    o.ZLoss: _z_loss,
}

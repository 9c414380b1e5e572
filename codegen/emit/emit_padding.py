"""Emits ops that tell padding from real tokens, and the balance terms that leave padding out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _real_tokens(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.RealTokens)
    e.result(op, aten.to.dtype, e.call(op, aten.ne.Scalar, *e.refs(op), op.padding), torch.int64)


def _count_real_tokens(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountRealTokens)
    e.result(op, aten.sum.default, e.call(op, aten.ne.Scalar, *e.refs(op), op.padding))


def _mask_choices(e: Emitter, op: Op) -> None:
    experts, real = e.refs(op)
    e.result(op, aten.where.ScalarOther, _column(e, op, real), experts, -1)


def _switch_loss(e: Emitter, op: Op) -> None:
    probabilities, choices, *real = e.refs(op)
    if real:
        probabilities = e.call(op, aten.where.ScalarOther, _column(e, op, *real), probabilities, 0)
    e.result(op, torch.ops.moec.switch_loss.default, probabilities, choices)


def _z_loss(e: Emitter, op: Op) -> None:
    logits, *real = e.refs(op)
    terms = e.call(op, aten.square.default, e.call(op, aten.logsumexp.default, logits, [-1]))
    e.result(op, aten.sum.default, _of_real_tokens(e, op, terms, real))


def _of_real_tokens(e: Emitter, op: Op, terms: fx.Node, real: Sequence[fx.Node]) -> fx.Node:
    """Terms [batch, sequence], 0 for padding. Selects and does not multiply: a padding token's NaN must not remain."""
    if not real:
        return terms
    return e.call(op, aten.where.ScalarOther, _mask(e, op, *real), terms, 0)


def _mask(e: Emitter, op: Op, real: fx.Node) -> fx.Node:
    return e.call(op, aten.ne.Scalar, real, 0)


def _column(e: Emitter, op: Op, real: fx.Node) -> fx.Node:
    """Which tokens are real, [batch, sequence, 1]."""
    return e.call(op, aten.unsqueeze.default, _mask(e, op, real), -1)


PADDING: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.CountRealTokens: _count_real_tokens,
    o.MaskChoices: _mask_choices,
    o.RealTokens: _real_tokens,
    o.SwitchLoss: _switch_loss,
    o.ZLoss: _z_loss,
}

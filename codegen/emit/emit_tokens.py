"""Emits ops that count tokens, and that mark padding."""

from __future__ import annotations

import torch
from torch import fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _real_tokens(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.RealTokens)
    e.result(op, aten.to.dtype, e.call(op, aten.ne.Scalar, *e.refs(op), op.padding), torch.int64)


def _count_real_tokens(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountRealTokens)
    e.result(op, aten.sum.default, e.call(op, aten.ne.Scalar, *e.refs(op), op.padding))


def _count_tokens(e: Emitter, op: Op) -> None:
    """Counts one element of each token's vector, as an integer: a sum of bf16 ones stops at 256."""
    column = e.call(op, aten.narrow.default, *e.refs(op), 2, 0, 1)
    ones = e.call(op, aten.ones_like.default, column)
    e.result(op, aten.sum.default, e.call(op, aten.to.dtype, ones, torch.int64))


def _mask_choices(e: Emitter, op: Op) -> None:
    experts, real = e.refs(op)
    e.result(op, aten.where.ScalarOther, real_column(e, op, real), experts, -1)


def real_mask(e: Emitter, op: Op, real: fx.Node) -> fx.Node:
    """Which tokens are real, [batch, sequence]."""
    return e.call(op, aten.ne.Scalar, real, 0)


def real_column(e: Emitter, op: Op, real: fx.Node) -> fx.Node:
    """Which tokens are real, [batch, sequence, 1]."""
    return e.call(op, aten.unsqueeze.default, real_mask(e, op, real), -1)


TOKENS: Emissions = {
    o.CountRealTokens: _count_real_tokens,
    o.CountTokens: _count_tokens,
    o.MaskChoices: _mask_choices,
    o.RealTokens: _real_tokens,
}

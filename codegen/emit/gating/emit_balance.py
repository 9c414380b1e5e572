"""Emits the balance terms, which leave padding out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from moec.codegen.emit.emit_tokens import real_column, real_mask
from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _largest_scores(e: Emitter, op: Op) -> None:
    """By a stable sort: `topk` breaks ties in no defined order."""
    assert isinstance(op, o.LargestScores)
    logits = e.call(op, aten.detach.default, *e.refs(op))
    order = e.call(op, aten.argsort.stable, logits, stable=True, dim=-1, descending=True)
    e.result(op, aten.narrow.default, order, -1, 0, op.k)


def _sum_groups(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.SumGroups)
    experts = e.shape(op.operands[0])[-1]
    assert isinstance(experts, int)
    groups = e.call(op, aten.unflatten.int, *e.refs(op), -1, [op.groups, experts // op.groups])
    e.result(op, aten.sum.dim_IntList, groups, [-1])


def _switch_loss(e: Emitter, op: Op) -> None:
    probabilities, choices, *real = e.refs(op)
    if real:
        probabilities = e.call(op, aten.where.ScalarOther, real_column(e, op, *real), probabilities, 0)
    e.result(op, torch.ops.moec.switch_loss.default, probabilities, choices)


def _z_loss(e: Emitter, op: Op) -> None:
    logits, *real = e.refs(op)
    terms = e.call(op, aten.square.default, e.call(op, aten.logsumexp.default, logits, [-1]))
    e.result(op, aten.sum.default, _mask_padding(e, op, terms, real))


def _mask_padding(e: Emitter, op: Op, terms: fx.Node, real: Sequence[fx.Node]) -> fx.Node:
    """Terms [batch, sequence], 0 for padding. Selects and does not multiply: a padding token's NaN must not remain."""
    if not real:
        return terms
    return e.call(op, aten.where.ScalarOther, real_mask(e, op, *real), terms, 0)


BALANCE: Emissions = {
    o.LargestScores: _largest_scores,
    o.SumGroups: _sum_groups,
    o.SwitchLoss: _switch_loss,
    o.ZLoss: _z_loss,
}

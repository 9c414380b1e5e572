"""Emits the ops of merged experts."""

from __future__ import annotations

import torch

from moec.codegen.emit.emit_tokens import real_column
from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir.ops.gating import merge_ops as m

aten = torch.ops.aten


def _merge_shares(e: Emitter, op: Op) -> None:
    x, weight, *real = e.refs(op)
    dtype = e.dtype(op.results[0].dtype)
    wide = e.call(op, aten.to.dtype, x, dtype)
    if real:
        wide = e.call(op, aten.where.ScalarOther, real_column(e, op, *real), wide, 0)
        sums = e.call(op, aten.sum.dim_IntList, wide, [1])
        count = e.call(op, aten.clamp_min.default, e.call(op, aten.sum.dim_IntList, *real, [1], True), 1)
        means = e.call(op, aten.div.Tensor, sums, count)
    else:
        means = e.call(op, aten.mean.dim, wide, [1])
    logits = e.call(op, aten.linear.default, means, e.call(op, aten.to.dtype, weight, dtype))
    logits = e.note_scores(op, e.call(op, aten.unsqueeze.default, logits, 1))  # those of a sequence
    e.result(op, aten.softmax.int, e.call(op, aten.squeeze.dim, logits, 1), -1)


def _merge_experts(e: Emitter, op: Op) -> None:
    shares, experts = e.refs(op)
    shape = e.shape(op.operands[1])[1:]
    flat = e.call(op, aten.flatten.using_ints, experts, 1) if len(shape) > 1 else experts
    merged = e.call(op, aten.mm.default, e.call(op, aten.type_as.default, shares, experts), flat)
    if len(shape) > 1:
        merged = e.call(op, aten.unflatten.int, merged, 1, list(shape))
    e.set_results(op, merged)


def _sequence_linear(e: Emitter, op: Op) -> None:
    operands = op.named(e.refs(op))
    weight, out = operands["weight"], e.shape(op.operands[1])[1:-1]
    is_flattened = len(out) > 1
    if is_flattened:
        weight = e.call(op, aten.flatten.using_ints, weight, 1, len(out))
    y = e.call(op, aten.matmul.default, operands["x"], e.call(op, aten.transpose.int, weight, 1, 2))
    if "bias" in operands:
        bias = e.call(op, aten.flatten.using_ints, operands["bias"], 1) if is_flattened else operands["bias"]
        y = e.call(op, aten.add.Tensor, y, e.call(op, aten.unsqueeze.default, bias, 1))
    if "real" in operands:
        y = e.call(op, aten.where.ScalarOther, real_column(e, op, operands["real"]), y, 0)
    if is_flattened:
        y = e.call(op, aten.unflatten.int, y, 2, list(out))
    e.set_results(op, y)


MERGE: Emissions = {
    m.MergeExperts: _merge_experts,
    m.MergeShares: _merge_shares,
    m.SequenceLinear: _sequence_linear,
}

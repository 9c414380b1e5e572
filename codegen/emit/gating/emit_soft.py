"""Emits the ops of soft mixtures."""

from __future__ import annotations

import torch

from moec.codegen.emit.emit_tokens import real_column
from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir.ops.gating import soft_ops as s

aten = torch.ops.aten


def _slot_weights(e: Emitter, op: Op) -> None:
    """Padding gets the least finite logit: a sequence of padding alone has a softmax too, which is then masked."""
    logits, *real = e.refs(op)
    logits = e.note_scores(op, logits)
    over_tokens = logits
    if real:
        lowest = torch.finfo(e.dtype(op.results[0].dtype)).min
        over_tokens = e.call(op, aten.where.ScalarOther, real_column(e, op, *real), logits, lowest)
    weights = [e.call(op, aten.softmax.int, over_tokens, 1), e.call(op, aten.softmax.int, logits, 2)]
    if real:
        weights = [e.call(op, aten.where.ScalarOther, real_column(e, op, *real), tensor, 0) for tensor in weights]
    e.set_results(op, *weights)


def _slot_inputs(e: Emitter, op: Op) -> None:
    assert isinstance(op, s.SlotInputs)
    x, dispatch = e.refs(op)
    transposed = e.call(op, aten.transpose.int, dispatch, 1, 2)
    means = e.call(op, aten.matmul.default, transposed, e.call(op, aten.type_as.default, x, dispatch))
    slots = e.call(op, aten.unflatten.int, means, 1, [op.num_experts, op.slots])
    e.result(op, aten.type_as.default, slots, x)


def _slot_rows(e: Emitter, op: Op) -> None:
    by_expert = e.call(op, aten.transpose.int, *e.refs(op), 0, 1)
    rows = e.call(op, aten.flatten.using_ints, by_expert, 1, 2)
    e.set_results(op, rows, e.call(op, torch.ops.moec.even_counts.default, rows))


def _slot_outputs(e: Emitter, op: Op) -> None:
    rows, _ = e.refs(op)
    slots = e.shape(op.operands[1])[s.SLOTS]
    assert isinstance(slots, int)
    e.result(op, aten.transpose.int, e.call(op, aten.unflatten.int, rows, 1, [-1, slots]), 0, 1)


def _slot_combine(e: Emitter, op: Op) -> None:
    outputs, combine = e.refs(op)
    flat = e.call(op, aten.flatten.using_ints, outputs, 1, 2)
    mixed = e.call(op, aten.matmul.default, combine, e.call(op, aten.type_as.default, flat, combine))
    e.result(op, aten.type_as.default, mixed, outputs)


SOFT: Emissions = {
    s.SlotCombine: _slot_combine,
    s.SlotInputs: _slot_inputs,
    s.SlotOutputs: _slot_outputs,
    s.SlotRows: _slot_rows,
    s.SlotWeights: _slot_weights,
}

"""Emits the ops of a mixture of experts after its gate."""

from __future__ import annotations

from typing import Any

import torch

from moec.codegen.emit.emit_windows import follow, windows_at
from moec.codegen.emit.emitter import Emissions, Emitter
from moec.codegen.emit.operators import recomputes
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
moec = torch.ops.moec


def _expert_mlp_padded(e: Emitter, op: Op) -> None:
    """Runs `expert_mlp` over all places of each expert, empty ones too; no token combines an empty place."""
    assert isinstance(op, o.ExpertMlpPadded)
    operands = op.named(e.refs(op))
    rows, weights = operands["rows"], operands.get("weights")
    counts = e.call(op, moec.even_counts.default, rows)
    flat = e.call(op, aten.flatten.using_ints, rows, 0, 1)
    flat_weights = None if weights is None else e.call(op, aten.flatten.using_ints, weights, 0, 1)
    experts = (operands["up"], operands["down"], operands.get("up_bias"), operands.get("down_bias"))
    arguments = (flat, counts, *experts, flat_weights, *op.activates().values(), e.ways(op))
    if recomputes(e, op):
        out = e.call(op, moec.expert_mlp_recomputed.default, *arguments)
    else:
        out = e.item(op, e.call(op, moec.expert_mlp.default, *arguments), 0)
    e.result(op, aten.view_as.default, out, rows)


def _best_score(e: Emitter, op: Op) -> None:
    e.result(op, aten.amax.default, e.call(op, aten.detach.default, *e.refs(op)), [-1])


def _expert_linear(e: Emitter, op: Op) -> None:
    """Multiplies padded rows in all places, empty ones too, and windows at the positions of all rows."""
    assert isinstance(op, o.ExpertLinear)
    operands, shape = op.named(e.refs(op)), e.shape(op.operands[1])
    rows, weight, bias = operands["rows"], operands["weight"], operands.get("bias")
    counts = operands.get("counts") or e.call(op, moec.even_counts.default, rows)
    padded = "counts" not in operands
    if padded:
        rows = e.call(op, aten.flatten.using_ints, rows, 0, 1)
    if len(shape) == 4:
        weight = e.call(op, aten.flatten.using_ints, weight, 2, 3)
    steps: list[tuple[Any, tuple[object, ...]]] = []  # what follows the product
    if op.positions > 1:
        rows = e.call(op, aten.flatten.using_ints, windows_at(e, op, rows, shape), 0, 1)
        rows = e.call(op, aten.contiguous.default, rows)  # of one row they are a view that overlaps
        counts = e.call(op, aten.mul.Scalar, counts, op.positions)
        steps += [(aten.view.default, ([-1, op.positions * int(shape[1])],))]
    steps += [(aten.gelu.default, ())] if op.then == "gelu" else []
    if padded:
        steps += [(aten.unflatten.int, (0, [shape[0], -1]))]
    product = (moec.expert_linear.default, rows, counts, weight, bias)
    follow(e, op, product, steps)


def _select_experts(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.SelectExperts)
    local = e.call(op, aten.sub.Scalar, *e.refs(op), op.first)
    below, above = e.call(op, aten.ge.Scalar, local, 0), e.call(op, aten.lt.Scalar, local, op.count)
    e.result(op, aten.where.ScalarOther, e.call(op, aten.logical_and.default, below, above), local, -1)


def _concat_counts(e: Emitter, op: Op) -> None:
    """Adds the counts, each padded with zeros to all experts: the virtual cluster runs no operator of a list."""
    widths = [int(e.shape(name)[-1]) for name in op.operands]
    total = None
    for number, counts in enumerate(e.refs(op)):
        widths_around = [sum(widths[:number]), sum(widths[number + 1 :])]
        if number == len(widths) - 1 and total is not None:
            e.result(op, aten.add.Tensor, total, e.call(op, aten.constant_pad_nd.default, counts, widths_around))
            return
        padded = e.call(op, aten.constant_pad_nd.default, counts, widths_around)
        total = padded if total is None else e.call(op, aten.add.Tensor, total, padded)


def _count_made(e: Emitter, op: Op) -> None:
    is_choice = e.call(op, aten.ge.Scalar, *e.refs(op), 0)
    e.result(op, aten.reshape.default, e.call(op, aten.sum.default, is_choice), [1, 1])


MIXTURES: Emissions = {
    o.BestScore: _best_score,
    o.ConcatCounts: _concat_counts,
    o.CountMade: _count_made,
    o.ExpertLinear: _expert_linear,
    o.ExpertMlpPadded: _expert_mlp_padded,
    o.SelectExperts: _select_experts,
}

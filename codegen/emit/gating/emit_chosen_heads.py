"""Emits the ops of a mixture of attention heads: rows sorted by group, the groups' products, and back to tokens."""

from __future__ import annotations

import torch
from torch import fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten

LEAST = torch.finfo(torch.float32).tiny
moec = torch.ops.moec


def _chosen_heads(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.ChosenHeads)
    operands = op.named(e.refs(op))
    groups, heads, width, _ = map(int, e.shape(op.operands[2]))
    permuted = e.call(op, moec.permute.default, operands["x"], operands["experts"], groups, op.some_are_none)
    rows, counts, positions = (e.item(op, permuted, index) for index in range(3))
    weight = e.call(op, aten.flatten.using_ints, operands["weight"], 1, 2)
    bias = e.call(op, aten.flatten.using_ints, operands["bias"], 1, 2) if "bias" in operands else None
    queries = e.call(op, moec.expert_linear.default, rows, counts, weight, bias)
    choices = _each_choice(e, op, positions)
    choice_queries = e.call(op, moec.sum_rows.default, queries, choices, counts)
    k = int(e.shape(op.operands[1])[2])
    by_choice = e.call(op, aten.unflatten.int, choice_queries, 2, [heads, width])
    by_choice = e.call(op, aten.unflatten.int, by_choice, 1, [-1, k])
    e.result(op, aten.flatten.using_ints, e.call(op, aten.transpose.int, by_choice, 2, 3), 2, 3)


def _mix_heads(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.MixHeads)
    attended, experts, weights, weight = e.refs(op)
    groups, _, heads, _ = map(int, e.shape(op.operands[3]))
    k = int(e.shape(op.operands[1])[2])
    by_choice = e.call(op, aten.transpose.int, e.call(op, aten.unflatten.int, attended, 2, [heads, k]), 2, 3)
    x = e.call(op, aten.flatten.using_ints, e.call(op, aten.flatten.using_ints, by_choice, 3, 4), 1, 2)
    permuted = e.call(op, moec.permute.default, x, _each_choice(e, op, experts), groups, op.some_are_none)
    rows, counts, positions = (e.item(op, permuted, index) for index in range(3))
    flat = e.call(op, aten.flatten.using_ints, weight, 2, 3)
    projected = e.call(op, moec.expert_linear.default, rows, counts, flat, None)
    positions = e.call(op, aten.view_as.default, positions, experts)
    e.result(op, moec.combine.default, projected, positions, weights)


def _each_choice(e: Emitter, op: Op, values: fx.Node) -> fx.Node:
    """`[batch, sequence, k]` → `[batch, sequence · k, 1]`: each choice becomes a token with one choice."""
    return e.call(op, aten.unsqueeze.default, e.call(op, aten.flatten.using_ints, values, 1, 2), -1)


def _count_groups(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountGroups)
    e.result(op, moec.count_choices.default, *e.refs(op), op.groups, 1)


def _detached_shares(e: Emitter, op: Op) -> None:
    (weights,) = e.refs(op)
    total = e.call(op, aten.sum.dim_IntList, e.call(op, aten.detach.default, weights), [-1], True)
    # Sigmoids of logits far below 0 are all 0.
    e.result(op, aten.div.Tensor, weights, e.call(op, aten.clamp_min.default, total, LEAST))


CHOSEN_HEADS: Emissions = {
    o.ChosenHeads: _chosen_heads,
    o.CountGroups: _count_groups,
    o.DetachedShares: _detached_shares,
    o.MixHeads: _mix_heads,
}

"""Emits the ops of a mixture of attention heads: rows sorted by group, the groups' products, and back to tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten

LEAST = torch.finfo(torch.float32).tiny
moec = torch.ops.moec


def _chosen_heads(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.ChosenHeads)
    given = op.named(e.refs(op))
    groups, heads, width, _ = map(int, e.shape(op.operands[2]))
    sent = e.call(op, moec.permute.default, given["x"], given["experts"], groups, op.some_are_none)
    rows, counts, positions = (e.item(op, sent, index) for index in range(3))
    weight = e.call(op, aten.flatten.using_ints, given["weight"], 1, 2)
    bias = e.call(op, aten.flatten.using_ints, given["bias"], 1, 2) if "bias" in given else None
    queries = e.call(op, moec.expert_linear.default, rows, counts, weight, bias)
    each = _each_choice(e, op, positions)
    of_choices = e.call(op, moec.sum_rows.default, queries, each, counts)
    k = int(e.shape(op.operands[1])[2])
    by_choice = e.call(op, aten.unflatten.int, of_choices, 2, [heads, width])
    by_choice = e.call(op, aten.unflatten.int, by_choice, 1, [-1, k])
    e.result(op, aten.flatten.using_ints, e.call(op, aten.transpose.int, by_choice, 2, 3), 2, 3)


def _mix_heads(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.MixHeads)
    attended, experts, weights, weight = e.refs(op)
    groups, _, heads, _ = map(int, e.shape(op.operands[3]))
    k = int(e.shape(op.operands[1])[2])
    by_choice = e.call(op, aten.transpose.int, e.call(op, aten.unflatten.int, attended, 2, [heads, k]), 2, 3)
    x = e.call(op, aten.flatten.using_ints, e.call(op, aten.flatten.using_ints, by_choice, 3, 4), 1, 2)
    sent = e.call(op, moec.permute.default, x, _each_choice(e, op, experts), groups, op.some_are_none)
    rows, counts, positions = (e.item(op, sent, index) for index in range(3))
    flat = e.call(op, aten.flatten.using_ints, weight, 2, 3)
    projected = e.call(op, moec.expert_linear.default, rows, counts, flat, None)
    positions = e.call(op, aten.view_as.default, positions, experts)
    e.result(op, moec.combine.default, projected, positions, weights)


def _each_choice(e: Emitter, op: Op, of_choices: fx.Node) -> fx.Node:
    """`[batch, sequence, k]` → `[batch, sequence · k, 1]`: every choice as a token of its own, with one choice."""
    return e.call(op, aten.unsqueeze.default, e.call(op, aten.flatten.using_ints, of_choices, 1, 2), -1)


def _count_groups(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountGroups)
    e.result(op, moec.count_choices.default, *e.refs(op), op.groups, 1)


def _detached_shares(e: Emitter, op: Op) -> None:
    (weights,) = e.refs(op)
    total = e.call(op, aten.sum.dim_IntList, e.call(op, aten.detach.default, weights), [-1], True)
    # Sigmoids of logits far below 0 are all 0.
    e.result(op, aten.div.Tensor, weights, e.call(op, aten.clamp_min.default, total, LEAST))


CHOSEN_HEADS: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.ChosenHeads: _chosen_heads,
    o.CountGroups: _count_groups,
    o.DetachedShares: _detached_shares,
    o.MixHeads: _mix_heads,
}

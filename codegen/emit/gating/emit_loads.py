"""Emits the ops of balance terms over the loads of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from moec.codegen.emit.emit_tokens import real_column
from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.ops import Conversion

aten = torch.ops.aten


def _first_choices(e: Emitter, op: Op) -> None:
    e.result(op, aten.narrow.default, *e.refs(op), -1, 0, 1)


def _expert_weights(e: Emitter, op: Op) -> None:
    """Scatters into a row with one element more than there are experts, which choices of −1 go to."""
    assert isinstance(op, o.ExpertWeights)
    weights, experts = e.refs(op)
    k = e.shape(op.operands[0])[-1]
    assert isinstance(k, int)
    padding = [0, op.num_experts + 1 - k]
    zeros = e.call(op, aten.constant_pad_nd.default, e.call(op, aten.zeros_like.default, weights), padding)
    chosen = e.call(op, aten.ge.Scalar, experts, 0)
    index = e.call(op, aten.where.ScalarOther, chosen, experts, op.num_experts)
    placed = e.call(op, aten.scatter_add.default, zeros, -1, index, weights)
    e.result(op, aten.narrow.default, placed, -1, 0, op.num_experts)


def _expected_loads(e: Emitter, op: Op) -> None:
    """For a chosen expert the threshold is the best logit that was not chosen, for any other one the k-th best."""
    clean, noisy, deviation, experts = e.refs(op)
    k = e.shape(op.operands[3])[-1]
    assert isinstance(k, int)
    marks = e.call(op, aten.zeros_like.default, e.call(op, aten.detach.default, noisy))
    chosen = e.call(op, aten.gt.Scalar, e.call(op, aten.scatter.value, marks, -1, experts, 1.0), 0)
    last = e.call(op, aten.gather.default, noisy, -1, e.call(op, aten.narrow.default, experts, -1, k - 1, 1))
    unchosen = e.call(op, aten.where.ScalarSelf, chosen, -math.inf, noisy)
    next_best = e.call(op, aten.amax.default, unchosen, [-1], True)
    distance = e.call(op, aten.sub.Tensor, clean, e.call(op, aten.where.self, chosen, next_best, last))
    scaled = e.call(op, aten.div.Tensor, distance, e.call(op, aten.clamp_min.default, deviation, 1e-10))
    tail = e.call(op, aten.erfc.default, e.call(op, aten.mul.Scalar, scaled, -(0.5**0.5)))
    e.result(op, aten.mul.Scalar, tail, 0.5)


def _loads_above(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.LoadsAbove)
    scores, logits, experts = e.refs(op)
    k = e.shape(op.operands[2])[-1]
    assert isinstance(k, int)
    last = e.call(op, aten.clamp_min.default, e.call(op, aten.narrow.default, experts, -1, k - 1, 1), 0)
    distance = e.call(op, aten.sub.Tensor, scores, e.call(op, aten.gather.default, logits, -1, last))
    scaled = e.call(op, aten.mul.Scalar, distance, -(0.5**0.5) / op.deviation)
    e.result(op, aten.mul.Scalar, e.call(op, aten.erfc.default, scaled), 0.5)


def _group_totals(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.GroupTotals)
    parts, *real = e.refs(op)
    if not _are_whole(e, op.results[0].name):
        parts = e.call(op, aten.detach.default, parts)
    counted = e.call(op, aten.constant_pad_nd.default, parts, [0, 1], 1.0)
    e.result(op, aten.sum.dim_IntList, _by_group(e, op, _mask_padding(e, op, counted, real)), [1, 2])


def _are_whole(e: Emitter, totals: str) -> bool:
    """Whether the value `totals` covers whole groups on this rank: then it is differentiated, to any order."""
    ops = e.block.ops
    is_local_sum = any(isinstance(op, o.GroupTotals) and op.results[0].name == totals for op in ops)
    return is_local_sum and not any(isinstance(op, Conversion) and totals in op.operands for op in ops)


def _variation_loss(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.VariationLoss)
    parts, totals, *real = e.refs(op)
    experts = e.shape(op.operands[0])[-1]
    assert isinstance(experts, int)
    sums = e.call(op, aten.narrow.default, totals, -1, 0, experts)
    mean = e.call(op, aten.mean.dim, sums, [-1], True)
    # The mean is 0 where all sums are.
    divisor = e.call(op, aten.where.ScalarSelf, e.call(op, aten.eq.Scalar, mean, 0), 1.0, mean)
    column = e.call(op, aten.narrow.default, e.call(op, aten.detach.default, parts), -1, 0, 1)
    ones = _by_group(e, op, _mask_padding(e, op, e.call(op, aten.ones_like.default, column), real))
    centered = e.call(op, aten.sub.Tensor, sums, mean)
    variance = e.call(op, aten.mean.dim, e.call(op, aten.square.default, centered), [-1], True)
    squares = e.call(op, aten.div.Tensor, variance, e.call(op, aten.square.default, divisor))
    num_tokens = e.call(op, aten.sum.dim_IntList, ones, [1, 2])
    values = e.call(op, aten.mul.Tensor, num_tokens, squares)
    if _are_whole(e, op.operands[1]):
        e.result(op, aten.sum.default, values)
        return
    # `s - detach(s) + v`: the value is v, the gradient that of s, which is linear in the parts.
    # ∂CV²/∂sumᵢ = 2 / (E · mean) · (centeredᵢ / mean - CV²).
    relative = e.call(op, aten.div.Tensor, centered, divisor)
    tokens = e.call(op, aten.narrow.default, totals, -1, experts, 1)
    scale = e.call(op, aten.mul.Scalar, e.call(op, aten.div.Tensor, tokens, divisor), 2.0 / experts)
    slopes = e.call(op, aten.mul.Tensor, e.call(op, aten.sub.Tensor, relative, squares), scale)
    local_parts = _by_group(e, op, _mask_padding(e, op, parts, real))
    linear = e.call(op, aten.sum.default, e.call(op, aten.mul.Tensor, local_parts, _over_tokens(e, op, slopes)))
    zero = e.call(op, aten.sub.Tensor, linear, e.call(op, aten.detach.default, linear))
    e.result(op, aten.add.Tensor, zero, e.call(op, aten.sum.default, values))


def _mask_padding(e: Emitter, op: Op, values: fx.Node, real: Sequence[fx.Node]) -> fx.Node:
    """Values of tokens [batch, sequence, …], 0 for padding."""
    return e.call(op, aten.where.ScalarOther, real_column(e, op, *real), values, 0) if real else values


def _by_group(e: Emitter, op: Op, values: fx.Node) -> fx.Node:
    """Values of tokens [batch, sequence, …] as [groups, sequences, sequence, …]."""
    assert isinstance(op, o.GroupTotals | o.VariationLoss)
    groups = e.program.routing_groups(op.group)  # 0: every sequence is a group
    if groups > 1:
        return e.call(op, aten.unflatten.int, values, 0, [groups, -1])
    return e.call(op, aten.unsqueeze.default, values, int(groups == 0))


def _over_tokens(e: Emitter, op: Op, values: fx.Node) -> fx.Node:
    """Values of groups [groups, n] as [groups, 1, 1, n]."""
    return e.call(op, aten.unsqueeze.default, e.call(op, aten.unsqueeze.default, values, 1), 1)


LOADS: Emissions = {
    o.ExpectedLoads: _expected_loads,
    o.ExpertWeights: _expert_weights,
    o.FirstChoices: _first_choices,
    o.GroupTotals: _group_totals,
    o.LoadsAbove: _loads_above,
    o.VariationLoss: _variation_loss,
}

"""Emits the ops of `sparsemixer`, round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten

LARGEST = 1 - 2.0**-20
"""Numbers are at most this: then a sum of probabilities times one of them is below the sum, however it is rounded."""


def _sample_experts(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.SampleExperts)
    call = partial(e.call, op)
    logits, numbers, training = e.refs(op)
    numbers, scores = call(aten.clamp_max.default, numbers, LARGEST), call(aten.detach.default, logits)
    evaluating, remaining = call(aten.eq.Scalar, training, 0), scores
    outside = call(aten.zeros_like.default, scores, dtype=torch.int64)
    experts, full = [], []
    for number in range(op.k):
        best = call(aten.amax.default, remaining, [-1], True)
        sizes = call(aten.maximum.default, call(aten.abs.default, scores), best)
        parts = call(aten.div.Tensor, call(aten.sub.Tensor, best, scores), sizes)
        far = call(aten.gt.Scalar, parts, 2 * op.jitter)
        outside = call(aten.add.Tensor, outside, call(aten.mul.Scalar, far, 1 << number))
        drawn = _drawn(e, op, call(aten.where.ScalarSelf, far, -math.inf, remaining), numbers, number)
        # A NaN among the logits becomes one of every key: `route` reports it.
        keys = call(aten.where.self, evaluating, remaining, drawn)
        keys = call(aten.add.Tensor, keys, call(aten.mul.Scalar, best, 0.0))
        chosen = e.item(op, call(torch.ops.moec.route.default, keys, None, 1, "softmax", "after", False), 2)
        luck = call(aten.gt.Scalar, call(aten.narrow.default, numbers, -1, op.k + number, 1), 0.75)
        is_best = call(aten.eq.Tensor, call(aten.gather.default, remaining, -1, chosen), best)
        whole = call(aten.logical_or.default, call(aten.logical_or.default, is_best, luck), evaluating)
        experts.append(chosen)
        full.append(call(aten.to.dtype, whole, torch.int64))
        remaining = call(aten.scatter.value, remaining, -1, chosen, -math.inf)
    probabilities = call(aten.softmax.int, logits, -1)
    e.several(op, probabilities, _side_by_side(e, op, experts), outside, _side_by_side(e, op, full))


def _drawn(e: Emitter, op: Op, candidates: fx.Node, numbers: fx.Node, number: int) -> fx.Node:
    """1 from the expert on that a uniform number draws from the softmax of candidates, else 0; 0 for others."""
    call = partial(e.call, op)
    sums = call(aten.cumsum.default, call(aten.softmax.int, candidates, -1), -1)
    count = e.shape(op.operands[0])[-1]
    assert isinstance(count, int)
    total = call(aten.narrow.default, sums, -1, count - 1, 1)
    passed = call(aten.gt.Tensor, sums, call(aten.mul.Tensor, total, call(aten.narrow.default, numbers, -1, number, 1)))
    candidate = call(aten.ne.Scalar, candidates, -math.inf)
    return call(aten.to.dtype, call(aten.logical_and.default, passed, candidate), e.dtype(op.results[0].dtype))


def _sampled_weights(e: Emitter, op: Op) -> None:
    """`p + detach(p) · (δ - 1)`: the value is δ · p, the gradient that of p."""
    call = partial(e.call, op)
    logits, experts, outside, full = e.refs(op)
    k, columns = e.shape(op.operands[1])[-1], []
    assert isinstance(k, int)
    for number in range(k):
        chosen, whole = (call(aten.narrow.default, each, -1, number, 1) for each in (experts, full))
        excluded = call(aten.ne.Scalar, call(aten.bitwise_and.Scalar, outside, 1 << number), 0)
        gates = call(aten.softmax.int, call(aten.where.ScalarSelf, excluded, -math.inf, logits), -1)
        p = call(aten.gather.default, gates, -1, chosen)
        reduced = call(aten.to.dtype, call(aten.rsub.Scalar, whole, 1), e.dtype(op.results[0].dtype))
        less = call(aten.mul.Scalar, reduced, -2 / 3)
        columns.append(call(aten.add.Tensor, p, call(aten.mul.Tensor, call(aten.detach.default, p), less)))
        outside = call(aten.scatter.value, outside, -1, chosen, -1)  # every bit
    e.several(op, _side_by_side(e, op, columns))


def _side_by_side(e: Emitter, op: Op, columns: Sequence[fx.Node]) -> fx.Node:
    """Columns [batch, sequence, 1] as [batch, sequence, columns]: a sum of padded ones, as graphs have no lists."""
    first, *others = (
        e.call(op, aten.constant_pad_nd.default, column, [number, len(columns) - 1 - number])
        for number, column in enumerate(columns)
    )
    for other in others:
        first = e.call(op, aten.add.Tensor, first, other)
    return first


SAMPLING: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.SampleExperts: _sample_experts,
    o.SampledWeights: _sampled_weights,
}

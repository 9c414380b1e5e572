"""Emits the ops of `sparsemixer`, round by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten

LARGEST = 1 - 2.0**-20
"""Random numbers are clamped to this: a sum of probabilities times one of them is then below the sum when rounded."""

FAR = -3e38
"""Added to the logit of an expert that is no candidate: its probability is 0. An addition takes a tenth of the time of
`where` with a mask that branch prediction misses (measured on CPU)."""


def _sample_experts(e: Emitter, op: Op) -> None:
    """`route` gives the probabilities and the best expert of the first round, and reports tokens without scores."""
    assert isinstance(op, o.SampleExperts)
    call = partial(e.call, op)
    logits, numbers, training = e.refs(op)
    numbers, scores = call(aten.clamp_max.default, numbers, LARGEST), call(aten.detach.default, logits)
    evaluating, sizes = call(aten.eq.Scalar, training, 0), call(aten.abs.default, scores)
    routed = call(torch.ops.moec.route.default, logits, None, 1, "softmax", "after", False)
    probabilities, best_expert = e.item(op, routed, 0), e.item(op, routed, 2)
    remaining, best = scores, call(aten.gather.default, scores, -1, best_expert)
    experts, full, bits = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for number in range(op.k):
        if number:
            remaining = call(aten.scatter.value, remaining, -1, experts[-1], -math.inf)
            largest = call(aten.max.dim, remaining, -1, True)
            best, best_expert = (e.item(op, largest, index) for index in range(2))
        gaps = call(aten.sub.Tensor, best, scores)
        gaps = call(aten.div.Tensor, gaps, call(aten.maximum.default, sizes, best))
        far = call(aten.gt.Scalar, gaps, 2 * op.jitter)
        bits.append(call(aten.mul.Scalar, far, 1 << number))
        excluded = call(aten.to.dtype, far, e.dtype(op.results[0].dtype))
        drawn = _drawn(e, op, call(aten.add.Tensor, remaining, excluded, alpha=FAR), numbers, number)
        chosen = call(aten.where.self, evaluating, best_expert, drawn)
        luck = call(aten.gt.Scalar, call(aten.narrow.default, numbers, -1, op.k + number, 1), 0.75)
        is_best = call(aten.eq.Tensor, call(aten.gather.default, remaining, -1, chosen), best)
        is_full = call(aten.logical_or.default, call(aten.logical_or.default, is_best, luck), evaluating)
        experts.append(chosen)
        full.append(call(aten.to.dtype, is_full, torch.int64))
    outside = reduce(partial(call, aten.add.Tensor), bits)
    e.set_results(op, probabilities, _side_by_side(e, op, experts), outside, _side_by_side(e, op, full))


def _drawn(e: Emitter, op: Op, candidates: fx.Node, numbers: fx.Node, number: int) -> fx.Node:
    """The expert that a uniform number draws from the softmax of candidates."""
    call = partial(e.call, op)
    sums = call(aten.cumsum.default, call(aten.softmax.int, candidates, -1), -1)
    count = e.shape(op.operands[0])[-1]
    assert isinstance(count, int)
    total = call(aten.narrow.default, sums, -1, count - 1, 1)
    passed = call(aten.mul.Tensor, total, call(aten.narrow.default, numbers, -1, number, 1))
    drawn = call(aten.searchsorted.Tensor, sums, passed, right=True)  # the first sum that is larger
    return call(aten.clamp_max.default, drawn, count - 1)  # where a token's scores are NaN


def _sampled_weights(e: Emitter, op: Op) -> None:
    """`p + detach(p) · (δ - 1)`: the value is δ · p, the gradient that of p."""
    call, dtype = partial(e.call, op), e.dtype(op.results[0].dtype)
    logits, experts, outside, full = e.refs(op)
    k, columns = e.shape(op.operands[1])[-1], list[fx.Node]()
    assert isinstance(k, int)
    for number in range(k):
        chosen, is_full = (call(aten.narrow.default, tensor, -1, number, 1) for tensor in (experts, full))
        excluded = call(aten.ne.Scalar, call(aten.bitwise_and.Scalar, outside, 1 << number), 0)
        candidates = call(aten.add.Tensor, logits, call(aten.to.dtype, excluded, dtype), alpha=FAR)
        gates = call(aten.softmax.int, candidates, -1)
        p = call(aten.gather.default, gates, -1, chosen)
        reduction = call(aten.mul.Scalar, call(aten.to.dtype, call(aten.rsub.Scalar, is_full, 1), dtype), -2 / 3)
        columns.append(call(aten.add.Tensor, p, call(aten.mul.Tensor, call(aten.detach.default, p), reduction)))
        if number < k - 1:
            outside = call(aten.scatter.value, outside, -1, chosen, -1)  # every bit
    e.set_results(op, _side_by_side(e, op, columns))


def _side_by_side(e: Emitter, op: Op, columns: Sequence[fx.Node]) -> fx.Node:
    """Columns [batch, sequence, 1] as [batch, sequence, columns]: a sum of padded columns, as graphs have no lists."""
    total, *padded = (
        e.call(op, aten.constant_pad_nd.default, column, [number, len(columns) - 1 - number])
        for number, column in enumerate(columns)
    )
    for column_padded in padded:
        total = e.call(op, aten.add.Tensor, total, column_padded)
    return total


SAMPLING: Emissions = {
    o.SampleExperts: _sample_experts,
    o.SampledWeights: _sampled_weights,
}

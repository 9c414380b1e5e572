"""Emits the op of `dselect_k`, and the sum of a number of each token."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from moec.codegen.emit.emit_tokens import real_mask
from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _decode_selectors(e: Emitter, op: Op) -> None:
    """A selector's weights are an outer product: those of the upper half of the bits by those of the lower half."""
    assert isinstance(op, o.DecodeSelectors)
    call = partial(e.call, op)
    codes, *alphas = (e.note_scores(op, logits) for logits in e.refs(op))
    steps = _smooth_steps(e, op, call(aten.unflatten.int, codes, -1, [-1, op.bits]), op.gamma)
    column = call(aten.unsqueeze.default, steps, -1)
    ones = call(aten.constant_pad_nd.default, column, [1, 0])
    zeros = call(aten.constant_pad_nd.default, call(aten.rsub.Scalar, column, 1), [0, 1])
    bit_weights = call(aten.add.Tensor, zeros, ones)  # [batch, sequence, k, bits, 2]
    upper = _products(e, op, bit_weights, range(op.bits // 2, op.bits))
    if alphas:
        shares = call(aten.unsqueeze.default, call(aten.softmax.int, alphas[0], -1), -1)
        upper = call(aten.mul.Tensor, shares, upper)
    if op.bits > 1:
        lower = _products(e, op, bit_weights, range(op.bits // 2))
        summed = call(aten.matmul.default, call(aten.transpose.int, upper, -1, -2), lower)
        weights = call(aten.flatten.using_ints, summed, -2, -1)
    else:
        weights = call(aten.sum.dim_IntList, upper, [-2])
    ones = call(aten.new_ones.default, weights, [2**op.bits], dtype=torch.int64)
    chosen = call(aten.to.dtype, call(aten.ne.Scalar, weights, 0), torch.int64)
    numbers = call(aten.mul.Tensor, chosen, call(aten.cumsum.default, ones, 0))  # expert + 1, or 0
    e.set_results(op, weights, call(aten.sub.Scalar, numbers, 1), _entropies(e, op, steps))


def _products(e: Emitter, op: Op, bit_weights: fx.Node, bits: range) -> fx.Node:
    """The weights of all numbers of these n `bits`: [batch, sequence, k, bits, 2] → [batch, sequence, k, 2ⁿ]."""
    call = partial(e.call, op)
    product = call(aten.select.int, bit_weights, -2, bits[0])
    for bit in bits[1:]:
        factor = call(aten.unsqueeze.default, call(aten.select.int, bit_weights, -2, bit), -1)
        outer = call(aten.mul.Tensor, factor, call(aten.unsqueeze.default, product, -2))
        product = call(aten.flatten.using_ints, outer, -2, -1)
    return product


def _smooth_steps(e: Emitter, op: Op, codes: fx.Node, gamma: float) -> fx.Node:
    """Exactly 0 and 1 beyond the step. The polynomial takes clamped codes, so that its gradient stays finite.

    Multiplies by 0 and 1: `where` with a mask that branch prediction misses takes longer (measured on CPU).
    """
    call, dtype = partial(e.call, op), e.dtype(op.results[0].dtype)
    t = call(aten.clamp.default, codes, -gamma / 2, gamma / 2)
    slope = call(aten.rsub.Scalar, call(aten.mul.Scalar, call(aten.square.default, t), 2 / gamma**3), 1.5 / gamma)
    polynomial = call(aten.add.Scalar, call(aten.mul.Tensor, t, slope), 0.5)
    beyond = call(aten.to.dtype, call(aten.gt.Scalar, codes, -gamma / 2), dtype)  # 0 up to the step
    above = call(aten.to.dtype, call(aten.ge.Scalar, codes, gamma / 2), dtype)  # 1 from its end on
    return call(aten.add.Tensor, call(aten.mul.Tensor, polynomial, call(aten.sub.Tensor, beyond, above)), above)


def _entropies(e: Emitter, op: Op, steps: fx.Node) -> fx.Node:
    """The entropies of all bits of a token. A bit that is 0 or 1 has none, and no gradient: the smooth step is flat."""
    call, dtype = partial(e.call, op), e.dtype(op.results[0].dtype)
    uncertain = call(aten.logical_and.default, call(aten.gt.Scalar, steps, 0), call(aten.lt.Scalar, steps, 1))
    factor = call(aten.to.dtype, uncertain, dtype)
    half = call(aten.mul.Scalar, call(aten.rsub.Scalar, factor, 1), 0.5)  # in place of 0 and of 1
    inside = call(aten.add.Tensor, call(aten.mul.Tensor, steps, factor), half)
    probabilities = (inside, call(aten.rsub.Scalar, inside, 1))
    entropy = call(aten.add.Tensor, *(call(aten.special_entr.default, p) for p in probabilities))
    return call(aten.sum.dim_IntList, call(aten.mul.Tensor, entropy, factor), [-2, -1])


def _sum_of_tokens(e: Emitter, op: Op) -> None:
    values, *real = e.refs(op)
    if real:
        values = e.call(op, aten.where.ScalarOther, real_mask(e, op, *real), values, 0)
    e.result(op, aten.sum.default, values)


SELECTORS: Emissions = {
    o.DecodeSelectors: _decode_selectors,
    o.SumOfTokens: _sum_of_tokens,
}

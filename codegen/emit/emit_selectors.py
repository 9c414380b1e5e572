"""Emits the op of `dselect_k`, and the sum of a number of each token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from moec.codegen.emit.emit_tokens import real_mask
from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _decode_selectors(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.DecodeSelectors)
    call = partial(e.call, op)
    codes, *alphas = e.refs(op)
    steps = _smooth_steps(e, op, call(aten.unflatten.int, codes, -1, [-1, op.bits]), op.gamma)
    column = call(aten.unsqueeze.default, steps, -1)
    ones = call(aten.constant_pad_nd.default, column, [1, 0])
    zeros = call(aten.constant_pad_nd.default, call(aten.rsub.Scalar, column, 1), [0, 1])
    of_bits = call(aten.add.Tensor, zeros, ones)  # [batch, sequence, k, bits, 2]
    selected = call(aten.select.int, of_bits, -2, 0)
    for bit in range(1, op.bits):
        factor = call(aten.unsqueeze.default, call(aten.select.int, of_bits, -2, bit), -1)
        product = call(aten.mul.Tensor, factor, call(aten.unsqueeze.default, selected, -2))
        selected = call(aten.flatten.using_ints, product, -2, -1)
    if alphas:
        shares = call(aten.unsqueeze.default, call(aten.softmax.int, alphas[0], -1), -1)
        selected = call(aten.mul.Tensor, shares, selected)
    weights = call(aten.sum.dim_IntList, selected, [-2])
    counted = call(aten.cumsum.default, call(aten.ones_like.default, weights, dtype=torch.int64), -1)
    numbers = call(aten.sub.Scalar, counted, 1)
    experts = call(aten.where.ScalarSelf, call(aten.eq.Scalar, weights, 0), -1, numbers)
    e.several(op, weights, experts, _entropies(e, op, steps))


def _smooth_steps(e: Emitter, op: Op, codes: fx.Node, gamma: float) -> fx.Node:
    """0 and 1 exactly beyond the step. The polynomial is of clamped codes, so that its gradient stays finite."""
    call = partial(e.call, op)
    t = call(aten.clamp.default, codes, -gamma / 2, gamma / 2)
    slope = call(aten.rsub.Scalar, call(aten.mul.Scalar, call(aten.square.default, t), 2 / gamma**3), 1.5 / gamma)
    between = call(aten.add.Scalar, call(aten.mul.Tensor, t, slope), 0.5)
    above = call(aten.where.ScalarSelf, call(aten.ge.Scalar, codes, gamma / 2), 1.0, between)
    return call(aten.where.ScalarSelf, call(aten.le.Scalar, codes, -gamma / 2), 0.0, above)


def _entropies(e: Emitter, op: Op, steps: fx.Node) -> fx.Node:
    """The entropies of all bits of a token. A bit that is 0 or 1 has none, and no gradient: the smooth step is flat."""
    call = partial(e.call, op)
    certain = call(aten.logical_or.default, call(aten.le.Scalar, steps, 0), call(aten.ge.Scalar, steps, 1))
    inside = call(aten.where.ScalarSelf, certain, 0.5, steps)
    both = (inside, call(aten.rsub.Scalar, inside, 1))
    entropy = call(aten.add.Tensor, *(call(aten.special_entr.default, each) for each in both))
    return call(aten.sum.dim_IntList, call(aten.where.ScalarSelf, certain, 0.0, entropy), [-2, -1])


def _sum_of_tokens(e: Emitter, op: Op) -> None:
    values, *real = e.refs(op)
    if real:
        values = e.call(op, aten.where.ScalarOther, real_mask(e, op, *real), values, 0)
    e.result(op, aten.sum.default, values)


SELECTORS: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.DecodeSelectors: _decode_selectors,
    o.SumOfTokens: _sum_of_tokens,
}

"""Emits the ops of gates that choose at random."""

from __future__ import annotations

import torch

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _uniform(e: Emitter, op: Op) -> None:
    """Jitter of ones by 1 is uniform in [0, 2), and 1 in evaluation. Halving is exact."""
    assert isinstance(op, o.Uniform)
    keys, training = e.refs(op)
    column = e.call(op, aten.ones_like.default, e.call(op, aten.unsqueeze.default, keys, -1), dtype=e.dtype("fp32"))
    ones = e.call(op, aten.repeat.default, column, [1, 1, op.count])
    drawn = e.call(op, torch.ops.moec.jitter.default, ones, keys, training, e.layer_number(), 1.0, op.stream)
    e.result(op, aten.mul.Scalar, drawn, 0.5)


def _second_at_random(e: Emitter, op: Op) -> None:
    experts, weights, numbers, training = e.refs(op)
    thresholds = e.call(op, aten.constant_pad_nd.default, numbers, [1, 0], -1.0)  # the first expert is always taken
    is_drawn = e.call(op, aten.gt.Tensor, e.call(op, aten.mul.Scalar, weights, 2.0), thresholds)
    is_taken = e.call(op, aten.logical_or.default, is_drawn, e.call(op, aten.eq.Scalar, training, 0))
    e.result(op, aten.where.ScalarOther, is_taken, experts, -1)


def _add_noise(e: Emitter, op: Op) -> None:
    clean, spread, noise = e.refs(op)
    deviation = e.call(op, aten.softplus.default, spread)
    noisy = e.call(op, aten.add.Tensor, clean, e.call(op, aten.mul.Tensor, noise, deviation))
    e.set_results(op, noisy, deviation)


RANDOM_GATES: Emissions = {
    o.AddLearnedNoise: _add_noise,
    o.SecondAtRandom: _second_at_random,
    o.Uniform: _uniform,
}

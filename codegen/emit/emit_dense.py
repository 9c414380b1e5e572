"""Emits the dense parts of a model: embeddings, norms, projections, and sums of paths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.value import promoted

aten = torch.ops.aten
moec = torch.ops.moec


def _embed(e: Emitter, op: Op) -> None:
    ids, table = e.refs(op)
    layout = e.value(op.operands[1]).layout
    if layout is None or not layout.axes:
        e.result(op, moec.embed.default, ids, table)
    else:
        (axis,) = layout.axes
        e.result(op, moec.embed_part.default, ids, table, e.group(axis))


def _embed_positions(e: Emitter, op: Op) -> None:
    """Counts positions from the ids, so that the graph holds no length."""
    ids, table, *positions = e.refs(op)
    if positions:
        e.result(op, moec.embed.default, *positions, table)
        return
    counted = e.call(op, aten.cumsum.default, e.call(op, aten.ones_like.default, ids), 1)
    e.result(op, moec.embed.default, e.call(op, aten.sub.Scalar, counted, 1), table)


def _layer_norm(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.LayerNorm)
    operands, dtype = op.named(e.refs(op)), op.results[0].dtype
    x, weight, bias = operands["x"], operands["weight"], operands.get("bias")
    if dtype == promoted(dtype):
        e.result(op, aten.layer_norm.default, x, list(e.shape(op.operands[1])), weight, bias, op.eps)
    else:
        e.result(op, moec.layer_norm.default, x, weight, bias, op.eps)


def _rms_norm(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.RmsNorm)
    x, weight = e.refs(op)
    e.result(op, aten.rms_norm.default, x, list(e.shape(op.operands[1])), weight, op.eps)


def _linear(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Linear)
    x, weight = e.refs(op)
    weight_shape = e.shape(op.operands[1])
    rank, n = len(e.value(op.operands[0]).shape), op.contract
    out = weight_shape[:-n]
    if n > 1:
        x = e.call(op, aten.flatten.using_ints, x, rank - n, rank - 1)
        weight = e.call(op, aten.flatten.using_ints, weight, len(out), len(weight_shape) - 1)
    if len(out) == 1:
        e.result(op, aten.linear.default, x, weight)
        return
    weight = e.call(op, aten.flatten.using_ints, weight, 0, len(out) - 1)
    e.result(op, aten.unflatten.int, e.call(op, aten.linear.default, x, weight), -1, list(out))


def _activation(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Activation)
    (x,) = e.refs(op)
    if ACTIVATIONS[op.kind].gated:
        e.result(op, moec.gated.default, x, op.kind, op.clamp, op.alpha)
        return
    x = e.call(op, aten.squeeze.dim, x, -2)
    *inner, outer = ACTIVATIONS[op.kind].function.aten
    for name in inner:
        x = e.call(op, getattr(aten, name).default, x)
    e.result(op, getattr(aten, outer).default, x)


def _add(e: Emitter, op: Op) -> None:
    terms = e.refs(op)
    if len(terms) == 1:
        e.result(op, aten.mul.Scalar, *terms, 1.0)
    else:
        _give_sum(e, op, terms)


def _add_bias(e: Emitter, op: Op) -> None:
    e.result(op, aten.add.Tensor, *e.refs(op))


def _scale(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Scale)
    e.result(op, aten.mul.Scalar, *e.refs(op), op.factor)


def _weighted_sum(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.WeightedSum)
    terms = list(zip(e.refs(op), op.weights, strict=True))
    if len(terms) == 1:
        e.result(op, aten.mul.Scalar, *terms[0])
    else:
        _give_sum(e, op, [e.call(op, aten.mul.Scalar, ref, weight) for ref, weight in terms])


def _give_sum(e: Emitter, op: Op, terms: Sequence[fx.Node]) -> None:
    """The sum of two or more terms, from the first to the last, as the op's result."""
    total, *middle, last = terms
    for term in middle:
        total = e.call(op, aten.add.Tensor, total, term)
    e.result(op, aten.add.Tensor, total, last)


def _router(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Router)
    wide = op.results[0].dtype
    dtype = e.value(op.operands[1]).dtype if op.rounds else wide
    operands = [
        node if e.value(name).dtype == dtype else e.call(op, aten.to.dtype, node, e.dtype(dtype))
        for name, node in zip(op.operands, e.refs(op), strict=True)
    ]
    if dtype == wide:
        e.result(op, aten.linear.default, *operands)
    else:
        e.result(op, aten.to.dtype, e.call(op, aten.linear.default, *operands), e.dtype(wide))


def _sigmoid_gate(e: Emitter, op: Op) -> None:
    x, logits = e.refs(op)
    e.result(op, aten.mul.Tensor, x, e.call(op, aten.sigmoid.default, logits))


def _gate_heads(e: Emitter, op: Op) -> None:
    x, logits = e.refs(op)
    gate = e.call(op, aten.sigmoid.default, logits)
    per_head = len(e.value(op.operands[1]).shape) == 3
    e.result(op, aten.mul.Tensor, x, e.call(op, aten.unsqueeze.default, gate, 3) if per_head else gate)


def _mix(e: Emitter, op: Op) -> None:
    *paths, logits = e.refs(op)
    weights = e.call(op, aten.softmax.int, logits, -1)
    terms = [
        e.call(op, aten.mul.Tensor, path, e.call(op, aten.narrow.default, weights, -1, index, 1))
        for index, path in enumerate(paths)
    ]
    e.result(op, aten.add.Tensor, *terms)


def _call(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Call)
    e.call_layer(op, op.layer, len(e.program.block(op.block).outputs))


DENSE: Emissions = {
    o.Activation: _activation,
    o.Add: _add,
    o.AddBias: _add_bias,
    o.Call: _call,
    o.Embed: _embed,
    o.EmbedPositions: _embed_positions,
    o.LayerNorm: _layer_norm,
    o.Linear: _linear,
    o.Mix: _mix,
    o.RmsNorm: _rms_norm,
    o.Router: _router,
    o.Scale: _scale,
    o.GateHeads: _gate_heads,
    o.SigmoidGate: _sigmoid_gate,
    o.WeightedSum: _weighted_sum,
}

"""What each op of the Program is in operators of `aten` and `moec`: one function per op, and their table."""

from __future__ import annotations

from collections.abc import Callable

from moec.codegen.emitter import BlockEmitter
from moec.codegen.graph import DTypeLiteral
from moec.codegen.lower_conversions import CONVERSIONS
from moec.codegen.lower_mixtures import MIXTURES
from moec.codegen.lower_padding import PADDING
from moec.codegen.lower_vocabulary import IGNORED_LABEL, VOCABULARY
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.value import promoted


def _embed(e: BlockEmitter, op: Op) -> None:
    ids, table = e.refs(op)
    layout = e.block.scope[op.operands[1]].layout
    if layout is None or not layout.axes:
        e.result(op, "moec.embed.default", ids, table)
    else:
        (axis,) = layout.axes
        e.result(op, "moec.embed_part.default", ids, table, e.group(axis))


def _embed_positions(e: BlockEmitter, op: Op) -> None:
    """Positions are counted from the ids, so that the graph holds no length."""
    ids, table = e.refs(op)
    ones = e.step(op, "ones", "aten.ones_like.default", ids)
    counted = e.step(op, "counted", "aten.cumsum.default", ones, 1)
    e.result(op, "moec.embed.default", e.step(op, "positions", "aten.sub.Scalar", counted, 1), table)


def _layer_norm(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.LayerNorm)
    x, weight, *biases = e.refs(op)
    bias = biases[0] if biases else None
    (width,) = e.block.scope[op.operands[1]].shape
    assert isinstance(width, int)
    dtype = op.results[0].dtype or ""
    if dtype == promoted(dtype):
        e.result(op, "aten.layer_norm.default", x, (width,), weight, bias, op.eps)
    else:
        e.result(op, "moec.layer_norm.default", x, weight, bias, op.eps)


def _rms_norm(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.RmsNorm)
    x, weight = e.refs(op)
    (width,) = e.block.scope[op.operands[1]].shape
    assert isinstance(width, int)
    e.result(op, "aten.rms_norm.default", x, (width,), weight, op.eps)


def _linear(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.Linear)
    x, weight = e.refs(op)
    weight_shape = e.shape(op.operands[1])
    rank, n = len(e.block.scope[op.operands[0]].shape), op.contract
    out = weight_shape[:-n]
    if n > 1:
        x = e.step(op, "in", "aten.flatten.using_ints", x, rank - n, rank - 1)
        weight = e.step(op, "w_in", "aten.flatten.using_ints", weight, len(out), len(weight_shape) - 1)
    if len(out) == 1:
        e.result(op, "aten.linear.default", x, weight)
        return
    weight = e.step(op, "w", "aten.flatten.using_ints", weight, 0, len(out) - 1)
    flat = e.step(op, "flat", "aten.linear.default", x, weight)
    e.result(op, "aten.unflatten.int", flat, -1, tuple(d for d in out if isinstance(d, int)))


def _rope(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.Rope)
    e.result(op, "moec.rope.default", *e.refs(op), op.theta)


def _attention(e: BlockEmitter, op: Op) -> None:
    q, k, v = (e.step(op, name, "aten.transpose.int", ref, 1, 2) for name, ref in zip("qkv", e.refs(op), strict=True))
    heads, kv_heads = (e.block.scope[name].shape[2] for name in op.operands[:2])
    # mask, dropout, causal; the scale is 1/sqrt(head_dim).
    attended = e.step(
        op, "heads", "aten.scaled_dot_product_attention.default", q, k, v, None, 0.0, True, enable_gqa=heads != kv_heads
    )
    e.result(op, "aten.transpose.int", attended, 1, 2)


def _activation(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.Activation)
    (x,) = e.refs(op)
    if o.ACTIVATION_PARTS[op.kind] == 2:
        e.result(op, f"moec.{op.kind}.default", x)
        return
    x = e.step(op, "in", "aten.squeeze.dim", x, -2)
    if op.kind == "relu2":
        e.result(op, "aten.square.default", e.step(op, "relu", "aten.relu.default", x))
    else:
        e.result(op, f"aten.{op.kind}.default", x)


def _add(e: BlockEmitter, op: Op) -> None:
    total, *rest = e.refs(op)
    if not rest:
        e.result(op, "aten.mul.Scalar", total, 1.0)
        return
    for index, term in enumerate(rest[:-1]):
        total = e.step(op, f"sum_{index}", "aten.add.Tensor", total, term)
    e.result(op, "aten.add.Tensor", total, rest[-1])


def _router(e: BlockEmitter, op: Op) -> None:
    x, weight = e.refs(op)
    result = op.results[0]
    if e.block.scope[op.operands[0]].dtype != result.dtype:
        dtype = DTypeLiteral.model_validate({"dtype": result.dtype})
        x = e.step(op, "in", "aten.to.dtype", x, dtype)
        weight = e.step(op, "w", "aten.to.dtype", weight, dtype)
    e.result(op, "aten.linear.default", x, weight)


def _sigmoid_gate(e: BlockEmitter, op: Op) -> None:
    x, logits = e.refs(op)
    e.result(op, "aten.mul.Tensor", x, e.step(op, "share", "aten.sigmoid.default", logits))


def _mix(e: BlockEmitter, op: Op) -> None:
    *paths, logits = e.refs(op)
    shares = e.step(op, "shares", "aten.softmax.int", logits, -1)
    terms = []
    for index, path in enumerate(paths):
        share = e.step(op, f"share_{index}", "aten.narrow.default", shares, -1, index, 1)
        terms.append(e.step(op, f"path_{index}", "aten.mul.Tensor", path, share))
    e.result(op, "aten.add.Tensor", *terms)


def _repeat_heads(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.RepeatHeads)
    e.result(op, "aten.repeat_interleave.self_int", *e.refs(op), op.copies, 0)


def _simple(target: str) -> Callable[[BlockEmitter, Op], None]:
    """An op that is one operator over its operands."""

    def emit_one(e: BlockEmitter, op: Op) -> None:
        e.result(op, target, *e.refs(op))

    return emit_one


def _weighted_sum(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.WeightedSum)
    terms = list(zip(e.refs(op), op.weights, strict=True))
    if len(terms) == 1:
        e.result(op, "aten.mul.Scalar", *terms[0])
        return
    total, *rest = [e.step(op, f"term_{i}", "aten.mul.Scalar", ref, weight) for i, (ref, weight) in enumerate(terms)]
    for index, term in enumerate(rest[:-1]):
        total = e.step(op, f"sum_{index}", "aten.add.Tensor", total, term)
    e.result(op, "aten.add.Tensor", total, rest[-1])


def _count_labels(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.CountLabels)
    (labels,) = e.refs(op)
    if op.valid_only:
        counted = e.step(op, "mask", "aten.ne.Scalar", labels, IGNORED_LABEL)
    else:
        counted = e.step(op, "ones", "aten.ones_like.default", labels)
    e.result(op, "aten.sum.default", counted)


def _count_tokens(e: BlockEmitter, op: Op) -> None:
    """One element of each token's vector, counted as an integer: a sum of bf16 ones stops at 256."""
    (x,) = e.refs(op)
    first = e.step(op, "first", "aten.narrow.default", x, 2, 0, 1)
    ones = e.step(op, "ones", "aten.ones_like.default", first)
    e.result(op, "aten.sum.default", e.step(op, "counted", "aten.to.dtype", ones, DTypeLiteral(dtype="int64")))


def _mean(e: BlockEmitter, op: Op) -> None:
    total, count = e.refs(op)
    e.result(op, "aten.div.Tensor", total, e.step(op, "count", "aten.clamp_min.default", count, 1))


def _call(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.Call)
    e.call(op, f"layers.{op.layer}", op.block, e.refs(op), e.outputs_of[op.block])


LOWERINGS: dict[type[Op], Callable[[BlockEmitter, Op], None]] = {
    **CONVERSIONS,
    **MIXTURES,
    **PADDING,
    **VOCABULARY,
    o.Activation: _activation,
    o.Add: _add,
    o.AddBias: _simple("aten.add.Tensor"),
    o.Attention: _attention,
    o.Call: _call,
    o.CountLabels: _count_labels,
    o.CountTokens: _count_tokens,
    o.Embed: _embed,
    o.EmbedPositions: _embed_positions,
    o.LayerNorm: _layer_norm,
    o.Linear: _linear,
    o.Mean: _mean,
    o.Mix: _mix,
    o.RepeatHeads: _repeat_heads,
    o.RmsNorm: _rms_norm,
    o.Rope: _rope,
    o.Router: _router,
    o.SigmoidGate: _sigmoid_gate,
    o.WeightedSum: _weighted_sum,
}

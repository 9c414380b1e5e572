"""Emits the ops of gates that are compositions, and computes the weights of replayed choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.codegen.emit.gating.emit_nested import weights_of_pairs
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.ops.gating import gate_ops as g

aten = torch.ops.aten

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64 (Steele et al. 2014): the step from one state to the next, and the factors of its mix."""
_WORD = 1 << 64


def _hash_route(e: Emitter, op: Op) -> None:
    """SplitMix64 in int64: products wrap; `>>` copies the sign bit, and a mask removes the copies.

    `mix(seed) + golden · (id · 2³¹ + expert)` is a sum of a number of the id and a number of the expert.
    """
    assert isinstance(op, g.HashRoute)
    (ids,) = e.refs(op)
    counts = e.call(op, aten.cumsum.default, e.call(op, aten.new_ones.default, ids, [op.num_experts]), 0)  # expert + 1
    steps = e.call(op, aten.mul.Scalar, counts, _signed(_GOLDEN))
    expert_terms = e.call(op, aten.add.Scalar, steps, _signed((_mix(op.seed) - _GOLDEN) % _WORD))
    columns = e.call(op, aten.unsqueeze.default, ids, -1)
    id_terms = e.call(op, aten.mul.Scalar, columns, _signed((_GOLDEN << 31) % _WORD))
    mixed = e.call(op, aten.add.Tensor, id_terms, expert_terms)
    for bits, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = e.call(op, aten.mul.Scalar, _xor_shifted(e, op, mixed, bits), _signed(factor))
    top = e.call(op, aten.topk.default, _xor_shifted(e, op, mixed, 31), op.k)
    chosen = e.item(op, top, 1)
    weights = e.call(op, aten.full_like.default, chosen, 1 / op.k, dtype=e.dtype(op.results[0].dtype))
    e.set_results(op, weights, chosen)


def _add_noise(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.AddNoise)
    logits, noise = e.refs(op)
    e.result(op, aten.add.Tensor, logits, noise, alpha=op.std)


def _xor_shifted(e: Emitter, op: Op, x: fx.Node, bits: int) -> fx.Node:
    shifted = e.call(op, aten.bitwise_right_shift.Tensor_Scalar, x, bits)
    return e.call(op, aten.bitwise_xor.Tensor, x, e.call(op, aten.bitwise_and.Scalar, shifted, (_WORD >> bits) - 1))


def _mix(x: int) -> int:
    for bits, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ x >> bits) * factor % _WORD
    return x ^ x >> 31


def _signed(x: int) -> int:
    return x - _WORD if x >= _WORD >> 1 else x


def _chosen_weights(e: Emitter, op: Op) -> None:
    e.set_results(op, e.trace(op, partial(_weights_of_route, op), *e.refs(op)))


def _renormalize(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Renormalize)
    weights, choices = e.refs(op)
    placed = e.call(op, aten.masked_fill.Scalar, weights, e.call(op, aten.lt.Scalar, choices, 0), 0)
    total = e.call(op, aten.sum.dim_IntList, placed, [-1], True)
    shares = e.call(op, aten.div.Tensor, placed, e.call(op, aten.clamp_min.default, total, _FP32_EPS))
    e.set_results(op, shares if op.scale == 1 else e.call(op, aten.mul.Scalar, shares, op.scale))


def _attend_experts(e: Emitter, op: Op) -> None:
    """Fused attention with tokens as the batch, one head of width 1, and experts as the sequence.

    On CPU fused attention gives 0 for a query that is NaN; adding 0 · q makes its logit NaN, and `route` reports it.
    """
    (projected,) = e.refs(op)
    experts, call = op.results[0].shape[-1], partial(e.call, op)
    q, *_ = parts = [call(aten.narrow.default, projected, -1, part * experts, experts) for part in range(3)]
    rows = [call(aten.unsqueeze.default, call(aten.flatten.using_ints, part, 0, 1), 1) for part in parts]
    heads = [call(aten.unsqueeze.default, part, -1) for part in rows]  # [tokens, 1, experts, 1]
    attended = call(aten.scaled_dot_product_attention.default, *heads, None, 0.0, False, scale=1.0)
    e.result(op, aten.add.Tensor, call(aten.reshape_as.default, attended, q), q, alpha=0)


def _every_expert(e: Emitter, op: Op) -> None:
    (scores,) = e.refs(op)
    (*_, experts) = op.results[0].shape
    ones = e.call(op, aten.new_ones.default, scores, [experts], dtype=torch.int64)
    numbers = e.call(op, aten.sub.Scalar, e.call(op, aten.cumsum.default, ones, 0), 1)
    e.result(op, aten.contiguous.default, e.call(op, aten.expand_as.default, numbers, scores))


def _round_weights(e: Emitter, op: Op) -> None:
    assert isinstance(op, g.RoundWeights)
    rounded = e.call(op, aten.to.dtype, *e.refs(op), e.dtype(op.dtype))
    e.result(op, aten.to.dtype, rounded, e.dtype(op.results[0].dtype))


GATES: Emissions = {
    o.AddNoise: _add_noise,
    o.ChosenWeights: _chosen_weights,
    o.Renormalize: _renormalize,
    g.AttendExperts: _attend_experts,
    g.EveryExpert: _every_expert,
    g.HashRoute: _hash_route,
    g.RoundWeights: _round_weights,
}


# ---- weights of replayed choices -----------------------------------------------------------------------


def _weights_of_route(op: Op, logits: Tensor, experts: Tensor) -> Tensor:
    assert isinstance(op, g.Route | o.ChosenWeights)
    weights = _unscaled(op, logits, experts)
    if op.scale != 1:
        weights = aten.mul.Scalar(weights, op.scale)
    return weights


def _unscaled(op: g.Route | o.ChosenWeights, logits: Tensor, experts: Tensor) -> Tensor:
    if op.score == "none":
        return _choice_scores(logits, experts)
    if op.score == "sigmoid" and op.normalize:
        return _normalized(aten.log_sigmoid.default(logits), experts)
    if op.score == "sigmoid":
        scored: Tensor = aten.sigmoid.default(_choice_scores(logits, experts))
        return scored
    if op.normalize or op.order == "after":
        return _normalized(logits, experts)
    return _choice_scores(aten.softmax.int(logits, -1), experts)


def _choice_scores(scores: Tensor, experts: Tensor) -> Tensor:
    """The scores of the choices; any score for a choice of −1."""
    chosen: Tensor = aten.gather.default(scores, -1, aten.clamp_min.default(experts, 0))
    return chosen


def _normalized(logarithms: Tensor, experts: Tensor) -> Tensor:
    """A softmax over the choices that are not −1; equal weights for a token that has none."""

    masked = aten.masked_fill.Scalar(_choice_scores(logarithms, experts), aten.lt.Scalar(experts, 0), _LEAST)
    weights: Tensor = aten.softmax.int(masked, -1)
    return weights


_FP32_EPS = 2.0**-23
_LEAST = -1e30
"""Below every logit of a choice, and finite, so that a token without choices has no NaN."""


WEIGHTS: dict[type[Op], Callable[[Op, Tensor, Tensor], Tensor]] = {
    g.Route: _weights_of_route,
    o.NestedRoute: weights_of_pairs,
}
"""For each op with `scores`: the weights `[…, k]` that it would give to the choices `[…, k]`, from scores `[…, E]`.

`moec verify` repeats the choices of one dtype in another by them, the op `replay` those of a rollout, where a choice of
−1 must not change the other weights. They only call operators on tensors, because `Emitter.trace` emits them.
"""

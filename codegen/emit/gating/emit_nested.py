"""Emits the ops of mixtures of mixtures (`passes/ir/ops/gating/nested_ops.py`), and computes weights of pairs."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
ALL = (1 << 63) - 1


def _nested_route(e: Emitter, op: Op) -> None:
    """Two calls of `moec::route`: the second has a row of logits for each outer choice."""
    assert isinstance(op, o.NestedRoute)
    logits = e.note_scores(op, *e.refs(op))  # by token: `route` sees the inner logits by outer choice
    outer_logits = e.call(op, aten.narrow.default, logits, -1, 0, op.outer)
    inner_logits = e.call(op, aten.narrow.default, logits, -1, op.outer, op.outer * op.inner)
    inner_logits = e.call(op, aten.unflatten.int, inner_logits, -1, [op.outer, op.inner])
    probabilities, weights, chosen = _route(e, op, outer_logits, op.k, op.score, op.order, op.normalize)
    groups = e.call(op, aten.unsqueeze.default, chosen, -1)
    index = e.call(op, aten.expand.default, groups, [-1, -1, -1, op.inner])
    chosen_logits = e.call(op, aten.flatten.using_ints, e.call(op, aten.gather.default, inner_logits, 2, index), 1, 2)
    _, *inner = _route(e, op, chosen_logits, op.inner_k, op.inner_score, op.inner_order, op.inner_normalize)
    inner_weights, inner_experts = (e.call(op, aten.unflatten.int, node, 1, [-1, op.k]) for node in inner)
    weights = e.call(op, aten.mul.Tensor, inner_weights, e.call(op, aten.unsqueeze.default, weights, -1))
    experts = e.call(op, aten.add.Tensor, inner_experts, e.call(op, aten.mul.Scalar, groups, op.inner))
    pairs = (e.call(op, aten.flatten.using_ints, node, 2, 3) for node in (weights, experts))
    e.set_results(op, probabilities, *pairs)


def _route(
    e: Emitter, op: Op, logits: fx.Node, k: int, score: str, order: str, normalize: bool
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Probabilities, weights and experts. `route` gives ties to the lower index; `topk` has no defined order."""
    results = e.call(op, torch.ops.moec.route.default, logits, None, k, score, order, normalize)
    return e.item(op, results, 0), e.item(op, results, 1), e.item(op, results, 2)


def _outer_choices(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.OuterChoices)
    first_pairs = e.call(op, aten.slice.Tensor, *e.refs(op), -1, 0, ALL, op.inner_k)
    e.result(op, aten.floor_divide.Scalar, first_pairs, op.inner)


NESTED: Emissions = {
    o.NestedRoute: _nested_route,
    o.OuterChoices: _outer_choices,
}


def weights_of_pairs(op: Op, logits: Tensor, experts: Tensor) -> Tensor:
    """The weights `[…, k · inner_k]` that `nested_route` would give to these pairs, from its logits."""
    assert isinstance(op, o.NestedRoute)
    outer_logits, inner_logits = logits[..., : op.outer], logits[..., op.outer :]
    inner_logits = inner_logits.reshape(*inner_logits.shape[:-1], op.outer, op.inner)
    pairs = experts.reshape(*experts.shape[:-1], op.k, op.inner_k)
    groups = pairs[..., 0].div(op.inner, rounding_mode="floor")
    chosen_logits = inner_logits.gather(-2, groups[..., None].expand(*groups.shape, op.inner))
    weights = _weights_of(outer_logits, groups, op.score, op.order, op.normalize)
    inner_weights = _weights_of(chosen_logits, pairs % op.inner, op.inner_score, op.inner_order, op.inner_normalize)
    return (weights[..., None] * inner_weights).flatten(-2)


def _weights_of(logits: Tensor, chosen: Tensor, score: str, order: str, normalize: bool) -> Tensor:
    if normalize or (order == "after" and score == "softmax"):  # by logarithms: sigmoids may all be 0
        logarithms = torch.nn.functional.logsigmoid(logits) if score == "sigmoid" else logits
        return logarithms.gather(-1, chosen).softmax(-1)
    scores = torch.sigmoid(logits) if score == "sigmoid" else logits.softmax(-1)
    return scores.gather(-1, chosen)

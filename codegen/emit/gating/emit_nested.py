"""Emits the ops of mixtures of mixtures (`passes/ir/ops/gating/nested_ops.py`), and weighs pairs that are given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
ALL = (1 << 63) - 1


def _nested_route(e: Emitter, op: Op) -> None:
    """Two calls of `moec::route`: the second has a row of logits for each outer choice."""
    assert isinstance(op, o.NestedRoute)
    logits = e.scored(op, *e.refs(op))  # by token: `route` sees the inner logits by outer choice
    of_outer = e.call(op, aten.narrow.default, logits, -1, 0, op.outer)
    of_inner = e.call(op, aten.narrow.default, logits, -1, op.outer, op.outer * op.inner)
    of_inner = e.call(op, aten.unflatten.int, of_inner, -1, [op.outer, op.inner])
    probabilities, weights, chosen = _route(e, op, of_outer, op.k, op.score, op.order, op.normalize)
    groups = e.call(op, aten.unsqueeze.default, chosen, -1)
    every = e.call(op, aten.expand.default, groups, [-1, -1, -1, op.inner])
    own = e.call(op, aten.flatten.using_ints, e.call(op, aten.gather.default, of_inner, 2, every), 1, 2)
    _, *inner = _route(e, op, own, op.inner_k, op.inner_score, op.inner_order, op.inner_normalize)
    within, inside = (e.call(op, aten.unflatten.int, each, 1, [-1, op.k]) for each in inner)
    weights = e.call(op, aten.mul.Tensor, within, e.call(op, aten.unsqueeze.default, weights, -1))
    experts = e.call(op, aten.add.Tensor, inside, e.call(op, aten.mul.Scalar, groups, op.inner))
    e.several(op, probabilities, *(e.call(op, aten.flatten.using_ints, pairs, 2, 3) for pairs in (weights, experts)))


def _route(
    e: Emitter, op: Op, logits: fx.Node, k: int, score: str, order: str, normalize: bool
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Probabilities, weights and experts. Unlike `topk`, which breaks ties in no defined order."""
    found = e.call(op, torch.ops.moec.route.default, logits, None, k, score, order, normalize)
    return e.item(op, found, 0), e.item(op, found, 1), e.item(op, found, 2)


def _outer_choices(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.OuterChoices)
    first = e.call(op, aten.slice.Tensor, *e.refs(op), -1, 0, ALL, op.inner_k)
    e.result(op, aten.floor_divide.Scalar, first, op.inner)


NESTED: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.NestedRoute: _nested_route,
    o.OuterChoices: _outer_choices,
}


def weights_of_pairs(op: Op, logits: Tensor, experts: Tensor) -> Tensor:
    """The weights `[…, k · inner_k]` that `nested_route` would give to these pairs, from its logits."""
    assert isinstance(op, o.NestedRoute)
    of_outer, of_inner = logits[..., : op.outer], logits[..., op.outer :]
    of_inner = of_inner.reshape(*of_inner.shape[:-1], op.outer, op.inner)
    pairs = experts.reshape(*experts.shape[:-1], op.k, op.inner_k)
    groups = pairs[..., 0].div(op.inner, rounding_mode="floor")
    own = of_inner.gather(-2, groups[..., None].expand(*groups.shape, op.inner))
    weights = _weights_of(of_outer, groups, op.score, op.order, op.normalize)
    within = _weights_of(own, pairs % op.inner, op.inner_score, op.inner_order, op.inner_normalize)
    return (weights[..., None] * within).flatten(-2)


def _weights_of(logits: Tensor, chosen: Tensor, score: str, order: str, normalize: bool) -> Tensor:
    if normalize or (order == "after" and score == "softmax"):  # by logarithms: sigmoids may all be 0
        logarithms = torch.nn.functional.logsigmoid(logits) if score == "sigmoid" else logits
        return logarithms.gather(-1, chosen).softmax(-1)
    scores = torch.sigmoid(logits) if score == "sigmoid" else logits.softmax(-1)
    return scores.gather(-1, chosen)

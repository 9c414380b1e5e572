"""Emits the ops that take routes, replay them, and give them."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.codegen.emit.gating.emit_gates import WEIGHTS
from moec.grammar.diagnostics import InternalError
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.roles import FREE_ROUTE

aten = torch.ops.aten


def _replay(e: Emitter, op: Op) -> None:
    scores, gate_choices, choices = e.refs(op)
    gate = _gate(e, op)
    is_free = e.call(op, aten.eq.Scalar, choices, FREE_ROUTE)
    experts = e.call(op, aten.where.self, is_free, gate_choices, choices)
    e.set_results(op, e.trace(op, partial(WEIGHTS[type(gate)], gate), scores, experts), experts)


def _gate(e: Emitter, op: Op) -> Op:
    """The gate that chose the operand `experts` by the operand `scores`."""
    scores, experts, _ = op.operands
    gate = next((g for g in e.block.ops if any(value.name == experts for value in g.results)), None)
    if gate is None or type(gate) not in WEIGHTS or gate.named(gate.operands)[gate.scores] != scores:
        raise InternalError(f"in {e.block.name}: replay of %{experts}, which no gate chose by %{scores}")
    return gate


def _take_routes(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.TakeRoutes)
    choices = e.call(op, aten.select.int, *e.refs(op), 2, op.mixture)
    e.result(op, aten.narrow.default, choices, 2, 0, op.k)


def _stack_routes(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.StackRoutes)
    padded: list[fx.Node] = []
    for name, choices in zip(op.operands, e.refs(op), strict=True):
        k = e.value(name).shape[-1]
        assert isinstance(k, int)
        padded.append(e.call(op, aten.constant_pad_nd.default, choices, [0, op.most - k], -1))
    e.result(op, aten.stack.default, padded, 2)


REPLAY: Emissions = {
    o.Replay: _replay,
    o.StackRoutes: _stack_routes,
    o.TakeRoutes: _take_routes,
    o.WholeSequences: lambda e, op: e.result(op, aten.alias.default, *e.refs(op)),
}

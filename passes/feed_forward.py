"""Lowers feed-forwards that every token goes through: `ffn`, and what stands beside routed experts."""

from __future__ import annotations

from moec.grammar.spec import FeedForward, GeGLU, Gelu, Model, Relu, Relu2, SwiGLU
from moec.passes.builder import Builder, normal, residual_init
from moec.passes.ir import ops as o
from moec.passes.ir.ops import ACTIVATION_PARTS

Activated = SwiGLU | GeGLU | Gelu | Relu | Relu2
"""Feed-forwards that are two projections with an activation between, which is called as they are."""


def feed_forward(b: Builder, model: Model, body: FeedForward, prefix: str, h: str) -> str:
    """`down(activation(up(h)))`, its parameters named under `prefix`; gives the result's name."""
    assert isinstance(body, Activated)
    parts, span = ACTIVATION_PARTS[body.word], body.span()
    up = b.parameter(f"{prefix}.up.weight", (parts, body.hidden, model.dim), model.dtype, normal(), span)
    down = b.parameter(f"{prefix}.down.weight", (model.dim, body.hidden), model.dtype, residual_init(model.depth), span)
    hidden = b.one(o.Linear, h, up, to="hidden", span=span)
    active = b.one(o.Activation, hidden, to="active", span=span, kind=body.word)
    return b.one(o.Linear, active, down, to="y", span=span)

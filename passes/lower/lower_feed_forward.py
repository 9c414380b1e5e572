"""Lowers feed-forwards that every token goes through: `ffn`, and shared and residual experts."""

from __future__ import annotations

from typing import Any

from moec.grammar.spec import Activated, Conv, FeedForward, LinearMap, Lora, Moe, Subject
from moec.grammar.spec.base import Node
from moec.passes.ir import Init, Matrices
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.lower.block_builder import PROJECTION, TABLE, Builder, normal, residual_init

UP = Matrices(1, 1, hidden=True)
"""Each half of a gated feed-forward is a matrix of its own."""


def parameters_of(body: Activated) -> dict[str, Any]:
    """The numbers that change a feed-forward's activation, as attributes of ops."""
    parameters = {name: getattr(body, name) for name in ACTIVATIONS[body.word].parameters}
    return {name: float(value) for name, value in parameters.items() if value is not None}


def feed_forward(b: Builder, subject: Subject, body: FeedForward, prefix: str, h: str) -> str:
    """`down(activation(up(h)))`, or the map of the word, with parameters named under `prefix`; the result's name."""
    if isinstance(body, LinearMap):
        return _linear(b, subject, body, prefix, h)
    if isinstance(body, Lora):
        return _lora(b, subject, body, prefix, h)
    if isinstance(body, Conv):
        return _conv(b, subject, body, prefix, h)
    assert isinstance(body, Activated)
    activation, span = ACTIVATIONS[body.word], body.span()
    up_shape, down_shape = (activation.parts, body.hidden, subject.dim), (subject.dim, body.hidden)
    up = b.parameter(f"{prefix}.up.weight", up_shape, subject.dtype, normal(), span, {"tp": 1}, UP)
    init = residual_init(subject.depth)
    down = b.parameter(f"{prefix}.down.weight", down_shape, subject.dtype, init, span, {"tp": 1}, PROJECTION)
    hidden = b.one(o.Linear, h, up, to="hidden", span=span)
    if body.bias:
        hidden = b.biased(hidden, f"{prefix}.up.bias", body.span("bias"), shard={"tp": 1})
    active = b.one(o.Activation, hidden, to="active", span=span, kind=activation.word, **parameters_of(body))
    y = b.one(o.Linear, active, down, to="y", span=span)
    return b.biased(y, f"{prefix}.down.bias", body.span("bias")) if body.bias else y


def _linear(b: Builder, subject: Subject, body: LinearMap, prefix: str, h: str) -> str:
    """One matrix, whole on every rank of `tp`."""
    shape, init, span = (subject.dim, subject.dim), residual_init(subject.depth), body.span()
    weight = b.parameter(f"{prefix}.weight", shape, subject.dtype, init, span, matrices=PROJECTION)
    y = b.one(o.Linear, h, weight, to="y", span=span)
    return b.biased(y, f"{prefix}.bias", body.span("bias")) if body.bias else y


def _lora(b: Builder, subject: Subject, body: Lora, prefix: str, h: str) -> str:
    """`up(down(h)) · alpha / rank`, both matrices whole on every rank of `tp`: rank is small."""
    dim, dtype, span = subject.dim, subject.dtype, body.span()
    down = b.parameter(f"{prefix}.down.weight", (body.rank, dim), dtype, normal(), span, matrices=PROJECTION)
    zeros = Init(kind="zeros")
    up = b.parameter(f"{prefix}.up.weight", (dim, body.rank), dtype, zeros, span, matrices=PROJECTION, decays=True)
    narrow = b.one(o.Linear, h, down, to="hidden", span=span)
    return b.scaled(b.one(o.Linear, narrow, up, to="y", span=span), scale_of(body), span)


def _conv(b: Builder, subject: Subject, body: Conv, prefix: str, h: str) -> str:
    """Two convolutions over each token's window, the second at one position, with a GELU between.

    The weights are whole on every rank of `tp`.
    """
    dim, dtype, span, zeros = subject.dim, subject.dtype, body.span(), Init(kind="zeros")
    shapes = {"up": (body.hidden, body.kernel, dim), "down": (dim, body.kernel, body.hidden)}
    inits = {"up": normal(), "down": residual_init(subject.depth)}
    y = windows(b, body, h)
    for part, positions, function in (("up", body.kernel, "gelu"), ("down", 1, "none")):
        shape = shapes[part]
        weight = b.parameter(f"{prefix}.{part}.weight", shape, dtype, inits[part], span, matrices=PROJECTION)
        bias = {}
        if body.bias:
            bias["bias"] = b.parameter(f"{prefix}.{part}.bias", shape[:1], dtype, zeros, body.span("bias"))
        y = b.one(o.WindowLinear, y, weight, optional=bias, to="y", span=span, positions=positions, then=function)
    return y


def windows(b: Builder, body: Node, h: str) -> str:
    """The window of each token that a convolutional feed-forward is applied to; `h` itself for all others.

    Both convolutions of size K reach over 2 · K − 1 tokens: back from the token where attention is causal, or where
    there is none, else to both sides. Zeros stand for tokens outside of the sequence, of other segments and of padding.
    """
    if not isinstance(body, Conv):
        return h
    reach = body.kernel - 1
    causal = all(getattr(op, "causal", True) for op in b.ops if isinstance(op, o.Attention))
    marks = {str(value.role): value.name for value in b.inputs if value.role in ("segments", "real")}
    before, after = (2 * reach, 0) if causal else (reach, reach)
    return b.one(o.Windows, h, optional=marks, to="window", span=body.span(), before=before, after=after)


def scale_of(body: Node) -> float:
    """The factor on a feed-forward's result: alpha / rank of a low-rank map (Hu et al. 2021, section 4.1), else 1."""
    return body.alpha / body.rank if isinstance(body, Lora) and body.alpha is not None else 1.0


def add_dense_paths(b: Builder, subject: Subject, moe: Moe, h: str, mixed: str) -> str:
    """`mixed · c₀ + residual(h) · c₁ + shared(h)`, with the terms that the layer has; returns the result's name."""
    if moe.residual is not None:
        span = moe.residual.span()
        residual = feed_forward(b, subject, moe.residual, "moe.residual", h)
        # DeepSpeed's coefficients have a bias (deepspeed/moe/layer.py, 0.19.8).
        logits = b.biased(
            _logits(b, subject, "moe.coefficient.weight", 2, moe.residual, h), "moe.coefficient.bias", span
        )
        mixed = b.one(o.Mix, mixed, residual, logits, to="mixed", span=span)
    if moe.shared is not None:
        shared = feed_forward(b, subject, moe.shared, "moe.shared", h)
        if getattr(moe.shared, "gated", False):
            logits = _logits(b, subject, "moe.shared_gate.weight", 1, moe.shared, h)
            shared = b.one(o.SigmoidGate, shared, logits, to="shared", span=moe.shared.span("gated"))
        mixed = b.one(o.Add, mixed, shared, to="mixed", span=moe.shared.span())
    return mixed


def _logits(b: Builder, subject: Subject, name: str, count: int, body: FeedForward, h: str) -> str:
    """`count` logits per token, in the model's dtype, as in DeepSpeed and Qwen2."""
    weight = b.parameter(name, (count, subject.dim), subject.dtype, normal(), body.span(), matrices=TABLE)
    return b.one(o.Linear, h, weight, to="path_logits", span=body.span())

"""Lowers feed-forwards that every token goes through: `ffn`, and what stands beside routed experts."""

from __future__ import annotations

from moec.grammar.spec import Activated, FeedForward, Moe, Subject
from moec.passes.builder import Builder, normal, residual_init
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS, ActivationKind


def activation_of(body: Activated) -> ActivationKind:
    """The activation of a feed-forward."""
    kind = ACTIVATIONS[body.word]
    assert all(getattr(body, name) is None for name in kind.parameters)
    return kind


def feed_forward(b: Builder, subject: Subject, body: FeedForward, prefix: str, h: str) -> str:
    """`down(activation(up(h)))`, its parameters named under `prefix`; gives the result's name."""
    assert isinstance(body, Activated)
    activation, span = activation_of(body), body.span()
    up = b.parameter(f"{prefix}.up.weight", (activation.parts, body.hidden, subject.dim), subject.dtype, normal(), span)
    down = b.parameter(
        f"{prefix}.down.weight", (subject.dim, body.hidden), subject.dtype, residual_init(subject.depth), span
    )
    hidden = b.one(o.Linear, h, up, to="hidden", span=span)
    if body.bias:
        hidden = b.biased(hidden, f"{prefix}.up.bias", body.span("bias"))
    active = b.one(o.Activation, hidden, to="active", span=span, kind=activation.word)
    y = b.one(o.Linear, active, down, to="y", span=span)
    return b.biased(y, f"{prefix}.down.bias", body.span("bias")) if body.bias else y


def beside_experts(b: Builder, subject: Subject, moe: Moe, h: str, mixed: str) -> str:
    """`mixed · c₀ + residual(h) · c₁ + shared(h)`, as far as the layer has them; gives the result's name."""
    if moe.residual is not None:
        span = moe.residual.span()
        beside = feed_forward(b, subject, moe.residual, "moe.residual", h)
        # DeepSpeed's coefficients have a bias (deepspeed/moe/layer.py, 0.19.8).
        shares = b.biased(
            _logits(b, subject, "moe.coefficient.weight", 2, moe.residual, h), "moe.coefficient.bias", span
        )
        mixed = b.one(o.Mix, mixed, beside, shares, to="mixed", span=span)
    if moe.shared is not None:
        assert isinstance(moe.shared, Activated)
        shared = feed_forward(b, subject, moe.shared, "moe.shared", h)
        if moe.shared.gated:
            logits = _logits(b, subject, "moe.shared_gate.weight", 1, moe.shared, h)
            shared = b.one(o.SigmoidGate, shared, logits, to="shared", span=moe.shared.span("gated"))
        mixed = b.one(o.Add, mixed, shared, to="mixed", span=moe.shared.span())
    return mixed


def _logits(b: Builder, subject: Subject, name: str, count: int, body: FeedForward, h: str) -> str:
    """A few numbers per token, in the model's dtype as DeepSpeed and Qwen2 have them."""
    weight = b.parameter(name, (count, subject.dim), subject.dtype, normal(), body.span())
    return b.one(o.Linear, h, weight, to="shares", span=body.span())

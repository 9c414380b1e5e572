"""Lowers `topk`, `switch` and `batch_priority`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import BatchPriority, Online, Switch, TopK
from moec.passes.ir import TRAINING
from moec.passes.ir.ops import AddNoise, Jitter, NormalNoise
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import BIAS, Gated, GateInputs


def topk(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    assert isinstance(gate, TopK)
    span, h = gate.span(), inputs.h
    if gate.jitter:
        training, line = b.setting(TRAINING), gate.span("jitter") or span
        h = b.one(
            Jitter, h, inputs.by_role["keys"], training, to="h", span=line, amount=gate.jitter, stream=inputs.stream(0)
        )
    logits = clean = inputs.router(b, span, h, biased=gate.bias == "learned")
    if gate.noise:
        logits = _with_noise(b, gate, inputs, logits)
    online = isinstance(gate.bias, Online)
    bias = {"bias": b.state(BIAS, (inputs.experts,), gate.span("bias"))} if online else {}
    groups = {} if gate.keep_groups in (None, gate.groups) else _groups(gate)
    p, w, e = b.add(
        g.Route, logits, to="p w e", span=span, optional=bias,
        k=gate.k, score=gate.score, order=gate.order, normalize=gate.normalize, scale=gate.scale, **groups,
    )  # fmt: skip
    extras = {"clean": clean} if gate.noise else {}
    return Gated(w=w, e=e, logits=logits, p=p, by_scores=not online and not groups, extras=extras)


def _with_noise(b: Builder, gate: TopK, inputs: GateInputs, logits: str) -> str:
    """Logits with noise in training. Balance terms take these logits too."""
    training, line = b.setting(TRAINING), gate.span("noise") or gate.span()
    noise = b.one(NormalNoise, logits, inputs.by_role["keys"], training, to="noise", span=line, stream=inputs.stream(1))
    return b.one(AddNoise, logits, noise, to="logits", span=line, std=gate.noise)


def _groups(gate: TopK) -> dict[str, object]:
    """The attributes of a choice among some of the groups."""
    return {"groups": gate.groups, "keep_groups": gate.keep_groups, "group_score": gate.group_score}


def switch(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    assert isinstance(gate, Switch)
    spans = {key: span for key in ("", "jitter") if (span := gate.span(key))}
    return topk(b, TopK(k=1, jitter=gate.jitter).with_spans(spans), inputs)


def batch_priority(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """The capacity has its order (`Moe.order`)."""
    assert isinstance(gate, BatchPriority)
    spans = {key: span for key in ("", "k") if (span := gate.span(key))}
    return topk(b, TopK(k=gate.k).with_spans(spans), inputs)

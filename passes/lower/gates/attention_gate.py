"""Lowers `attention_router`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import AttentionRouter
from moec.passes.ir.ops import Router
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.lower.block_builder import TABLE, Builder, normal
from moec.passes.lower.gates.gated import Gated, GateInputs


def attention_router(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """One projection gives query, key and value; the k largest logits are chosen and softmaxed."""
    assert isinstance(gate, AttentionRouter)
    span, shape = gate.span(), (3 * inputs.experts, inputs.subject.dim)
    weight = b.parameter(f"{inputs.prefix}.weight", shape, inputs.dtype, normal(), span, matrices=TABLE)
    projected = b.one(Router, inputs.h, weight, to="projected", span=span, rounds=inputs.subject.rounds_logits)
    logits = b.one(g.AttendExperts, projected, to="logits", span=span)
    p, w, e = b.add(
        g.Route, logits, to="p w e", span=span, k=gate.k, score="softmax", order="after", normalize=False
    )  # fmt: skip
    return Gated(w=w, e=e, logits=logits, p=p, by_scores=True)

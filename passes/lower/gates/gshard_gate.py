"""Lowers `gshard`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import GShard
from moec.passes.ir import TRAINING
from moec.passes.ir.ops import SecondAtRandom, Uniform
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs


def gshard(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    assert isinstance(gate, GShard)
    span, training = gate.span(), b.setting(TRAINING)
    logits = inputs.router(b, span)
    p, w, e = b.add(
        g.Route, logits, to="p w e", span=span, k=gate.k, score="softmax", order="before", normalize=True
    )  # fmt: skip
    u = b.one(Uniform, inputs.by_role["keys"], training, to="u", span=span, count=1, stream=inputs.stream(1))
    e = b.one(SecondAtRandom, e, w, u, training, to="e", span=span)
    return Gated(w=w, e=e, logits=logits, p=p, some_are_none=True)

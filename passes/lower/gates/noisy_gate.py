"""Lowers `noisy_topk`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import NoisyTopK
from moec.passes.ir import TRAINING
from moec.passes.ir.ops import AddLearnedNoise, NormalNoise
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs


def noisy_topk(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """Scores for balance terms are those that choose: with the noise."""
    assert isinstance(gate, NoisyTopK)
    span = gate.span()
    clean = inputs.router(b, span, to="clean")
    spread = inputs.router(b, span, name="noise.", to="spread")
    noise = b.one(
        NormalNoise, clean, inputs.by_role["keys"], b.setting(TRAINING), to="noise", span=span, stream=inputs.stream(1)
    )
    logits, deviation = b.add(AddLearnedNoise, clean, spread, noise, to="logits deviation", span=span)
    p, w, e = b.add(
        g.Route, logits, to="p w e", span=span, k=gate.k, score="softmax", order="after", normalize=False
    )  # fmt: skip
    return Gated(w=w, e=e, logits=logits, p=p, extras={"clean": clean, "deviation": deviation})

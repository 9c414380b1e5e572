"""Lowers `sparsemixer`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import SparseMixer
from moec.passes.ir import TRAINING
from moec.passes.ir.ops import SampledWeights, SampleExperts, Uniform
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs


def sparsemixer(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    assert isinstance(gate, SparseMixer)
    span, training = gate.span(), b.setting(TRAINING)
    logits = inputs.router(b, span)
    numbers, keys = 2 * gate.k, inputs.by_role["keys"]
    u = b.one(Uniform, keys, training, to="u", span=span, count=numbers, stream=inputs.stream(1))
    p, e, outside, full = b.add(
        SampleExperts, logits, u, training, to="p e outside full", span=span, k=gate.k, jitter=gate.jitter
    )  # fmt: skip
    w = b.one(SampledWeights, logits, e, outside, full, to="w", span=span)
    return Gated(w=w, e=e, logits=logits, p=p)

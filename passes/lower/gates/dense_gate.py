"""Lowers `dense`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Dense, TopK
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs, probabilities
from moec.passes.lower.gates.topk_gates import topk


def dense(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """All experts are chosen (Jacobs et al. 1991, equation 1).

    The expert with the largest probability is first where the order matters; elsewhere nothing is sorted.
    """
    assert isinstance(gate, Dense)
    span = gate.span()
    if inputs.ordered:
        return topk(b, TopK(k=inputs.experts).with_spans({"": span} if span else {}), inputs)
    logits = inputs.router(b, span)
    p = probabilities(b, logits, span)
    e = b.one(g.EveryExpert, p, to="e", span=span)
    return Gated(w=p, e=e, logits=logits, p=p, by_scores=True)

"""Lowers `dense`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Dense, TopK
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, Given
from moec.passes.lower.gates.topk_gates import topk


def dense(b: Builder, gate: Node, given: Given) -> Gated:
    """All experts are chosen, the one with the largest probability first (Jacobs et al. 1991, equation 1)."""
    assert isinstance(gate, Dense)
    span = gate.span()
    return topk(b, TopK(k=given.experts).with_spans({"": span} if span else {}), given)

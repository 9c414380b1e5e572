"""Lowers `hash`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Hash
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, Given


def hash_gate(b: Builder, gate: Node, given: Given) -> Gated:
    assert isinstance(gate, Hash)
    w, e = b.add(
        g.HashRoute, given.beside["tokens"], to="w e", span=gate.span(),
        k=gate.k, num_experts=given.experts, seed=gate.seed,
    )  # fmt: skip
    return Gated(w=w, e=e)

"""Lowers `hash`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Hash
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs


def hash_gate(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    assert isinstance(gate, Hash)
    w, e = b.add(
        g.HashRoute, inputs.by_role["tokens"], to="w e", span=gate.span(),
        k=gate.k, num_experts=inputs.experts, seed=gate.seed,
    )  # fmt: skip
    return Gated(w=w, e=e)

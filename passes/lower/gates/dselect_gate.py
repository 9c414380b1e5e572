"""Lowers `dselect_k`."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import DSelectK
from moec.passes.ir.ops import DecodeSelectors, SumOfTokens
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs


def dselect_k(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """Every expert is a choice, −1 where its weight is exactly 0: as codes become binary, tokens have fewer choices."""
    assert isinstance(gate, DSelectK)
    span, bits = gate.span(), inputs.experts.bit_length() - 1
    codes = inputs.router(b, span, name="codes.", to="codes", outputs=gate.k * bits)
    alphas = {"alphas": inputs.router(b, span, to="alphas", outputs=gate.k)} if gate.k > 1 else {}
    w, e, entropies = b.add(
        DecodeSelectors, codes, optional=alphas, to="w e entropies", span=span, bits=bits, gamma=gate.gamma
    )  # fmt: skip
    terms = []
    if gate.entropy:
        entropy = b.one(SumOfTokens, entropies, optional=inputs.real, to="entropy", span=gate.span("entropy"))
        terms.append((entropy, gate.entropy))
    return Gated(w=w, e=e, p=w, some_are_none=True, terms=tuple(terms))

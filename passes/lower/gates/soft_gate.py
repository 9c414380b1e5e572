"""Lowers `soft`: experts compute slots, which are mixtures of tokens, and tokens mix the results."""

from __future__ import annotations

from collections.abc import Callable

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Soft
from moec.passes.ir.ops import Router
from moec.passes.ir.ops.gating import soft_ops as s
from moec.passes.lower.block_builder import TABLE, Builder, normal
from moec.passes.lower.gates.gated import GateInputs

Rows = Callable[[str], str]
"""Experts as a function from the name of rows in places to the name of their results."""


def soft_mixture(b: Builder, gate: Node, inputs: GateInputs, experts: Rows) -> tuple[str, str]:
    """The mixed value's name, and that of the counts of rows per expert. There are no choices."""
    assert isinstance(gate, Soft)
    span, slots = gate.span(), inputs.experts * gate.slots
    shape, dtype = (slots, inputs.subject.dim), inputs.dtype
    weight = b.parameter("moe.gate.weight", shape, dtype, normal(), span, matrices=TABLE)
    logits = b.one(Router, inputs.h, weight, to="logits", span=span, rounds=inputs.subject.rounds_logits)
    dispatch, combine = b.add(s.SlotWeights, logits, optional=inputs.real, to="dispatch combine", span=span)
    vectors = b.one(
        s.SlotInputs, inputs.h, dispatch, to="inputs", span=span, num_experts=inputs.experts, slots=gate.slots
    )
    rows, counts = b.add(s.SlotRows, vectors, to="rows counts", span=span)
    outputs = b.one(s.SlotOutputs, experts(rows), vectors, to="outputs", span=span)
    return b.one(s.SlotCombine, outputs, combine, to="mixed", span=span), counts

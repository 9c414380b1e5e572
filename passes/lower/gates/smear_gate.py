"""Lowers `smear`: one expert of each sequence, which all of its tokens go through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Smear
from moec.passes.ir import ops as o
from moec.passes.ir.ops.gating import merge_ops as m
from moec.passes.lower.block_builder import TABLE, Builder, Located, normal
from moec.passes.lower.gates.gated import GateInputs


def smear_mixture(
    b: Builder,
    gate: Node,
    inputs: GateInputs,
    weights: Sequence[str],
    biases: Mapping[str, str],
    attributes: Mapping[str, Any],
    span: Located,
) -> str:
    """The mixed value's name, from the names of the experts' up and down weights and of their biases, if any.

    `attributes` are the activation and its parameters, as an op of experts has them.
    """
    assert isinstance(gate, Smear)
    line, shape = gate.span(), (inputs.experts, inputs.subject.dim)
    router = b.parameter("moe.gate.weight", shape, inputs.dtype, normal(), line, matrices=TABLE)
    shares = b.one(m.MergeShares, inputs.h, router, optional=inputs.real, to="shares", span=line)
    up, down = (b.one(m.MergeExperts, shares, weight, to="merged", span=line) for weight in weights)
    merged = {name: b.one(m.MergeExperts, shares, bias, to="merged", span=line) for name, bias in biases.items()}
    up_bias = {"bias": merged["up_bias"]} if merged else {}
    down_bias = {"bias": merged["down_bias"]} if merged else {}
    hidden = b.one(m.SequenceLinear, inputs.h, up, optional=up_bias, to="hidden", span=span)
    activation_attributes = {"kind" if name == "activation" else name: value for name, value in attributes.items()}
    active = b.one(o.Activation, hidden, to="active", span=span, **activation_attributes)
    return b.one(m.SequenceLinear, active, down, optional=down_bias | inputs.real, to="mixed", span=span)

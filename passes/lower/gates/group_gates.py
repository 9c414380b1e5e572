"""Lowers gates that choose for all tokens of a routing group at once."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Base, ExpertChoice
from moec.passes.ir import TRAINING
from moec.passes.ir.ops import ChosenWeights
from moec.passes.ir.ops.gating import group_gate_ops as gg
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs, probabilities


def expert_choice(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """The weights of choices are their probabilities."""
    assert isinstance(gate, ExpertChoice)
    span, logits = gate.span(), inputs.router(b, gate.span())
    p = probabilities(b, logits, span)
    e = b.one(
        gg.ChooseTokens, p, optional=inputs.real, to="e", span=span,
        group=inputs.group, parts=gate.factor.numerator, whole=gate.factor.denominator,
    )  # fmt: skip
    return Gated(w=p, e=e, logits=logits, p=p, some_are_none=True)


def base(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """The weight is the sigmoid of the logit (Lewis et al. 2021, eq. 1)."""
    assert isinstance(gate, Base)
    span, logits = gate.span(), inputs.router(b, gate.span())
    p, real = probabilities(b, logits, span), inputs.real
    training = b.setting(TRAINING)
    e = b.one(gg.BalancedAssignment, logits, training, optional=real, to="e", span=span, group=inputs.group)
    w = b.one(ChosenWeights, logits, e, to="w", span=span, score="sigmoid")
    return Gated(w=w, e=e, logits=logits, p=p, some_are_none=bool(real))

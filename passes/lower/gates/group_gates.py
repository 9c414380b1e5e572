"""Lowers gates that choose for all tokens of a routing group at once."""

from __future__ import annotations

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Base, ExpertChoice
from moec.passes.ir import TRAINING
from moec.passes.ir.ops import ChosenWeights
from moec.passes.ir.ops.gating import gate_ops as g
from moec.passes.ir.ops.gating import group_gate_ops as gg
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs


def expert_choice(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """Weights are the probabilities of `route`, which reports tokens without scores; its own choice is unused."""
    assert isinstance(gate, ExpertChoice)
    span, logits = gate.span(), inputs.router(b, gate.span())
    p, _, _ = b.add(
        g.Route, logits, to="p best best_expert", span=span, k=1, score="softmax", order="before", normalize=False
    )
    real = {"real": inputs.beside["real"]} if "real" in inputs.beside else {}
    e = b.one(
        gg.ChooseTokens, p, beside=real, to="e", span=span,
        group=inputs.group, parts=gate.factor.numerator, whole=gate.factor.denominator,
    )  # fmt: skip
    return Gated(w=p, e=e, logits=logits, p=p, some_are_none=True)


def base(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """The weight is the sigmoid of the logit (Lewis et al. 2021, eq. 1); `route` reports tokens without scores."""
    assert isinstance(gate, Base)
    span, logits = gate.span(), inputs.router(b, gate.span())
    p, _, _ = b.add(
        g.Route, logits, to="p best best_expert", span=span, k=1, score="softmax", order="before", normalize=False
    )
    real = {"real": inputs.beside["real"]} if "real" in inputs.beside else {}
    training = b.setting(TRAINING)
    e = b.one(gg.BalancedAssignment, logits, training, beside=real, to="e", span=span, group=inputs.group)
    w = b.one(ChosenWeights, logits, e, to="w", span=span, score="sigmoid")
    return Gated(w=w, e=e, logits=logits, p=p, some_are_none=bool(real))

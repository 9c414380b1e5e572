"""Lowers `topology`: its choices, and its term of the loss."""

from __future__ import annotations

from dataclasses import replace

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import TopK
from moec.passes.ir import TRAINING
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.gated import Gated, GateInputs
from moec.passes.lower.gates.placed_topology import PlacedTopology
from moec.passes.lower.gates.topk_gates import topk

RANKS = "ranks"
"""The key of the numbers of data ranks in `Gated.extras`."""


def topology(b: Builder, gate: Node, inputs: GateInputs) -> Gated:
    """`topk(k)`; with `share`, near experts replace the choices beyond the bound, with weights by the same rule."""
    assert isinstance(gate, PlacedTopology)
    spans = {key: span for key in ("", "k") if (span := gate.span(key))}
    gated = topk(b, TopK(k=gate.k).with_spans(spans), inputs)
    logits, p = gated.logits, gated.p
    assert logits is not None
    assert p is not None
    if gate.share is None and not gate.weight:
        return gated
    ranks = b.one(o.DataRanks, logits, to="ranks", span=gate.span())
    gated = replace(gated, extras={RANKS: ranks})
    if gate.share is None:
        return gated
    line = gate.span("share")
    bounded = b.one(
        o.BoundFar, gated.w, gated.e, ranks, b.setting(TRAINING), optional=inputs.real, to="bounded", span=line,
        share=gate.share.numerator, whole=gate.share.denominator, **gate.places,
    )  # fmt: skip
    e = b.one(o.ChooseNear, logits, bounded, ranks, to="e", span=line, **gate.places)
    w = b.one(o.ChosenWeights, p, e, to="w", span=line, score="none")
    return replace(gated, w=w, e=e, by_scores=False)


def topology_loss(b: Builder, gate: PlacedTopology, gated: Gated, e: str, real: dict[str, str]) -> str:
    """The term of the gate, whatever the mixture's routing group, over the choices `e` `[batch, sequence, k]`."""
    span = gate.span("weight") or gate.span()
    assert gated.p is not None
    experts = sum(gate.parts)
    choices = b.one(o.CountChoices, e, to="choices", span=span, num_experts=experts, group="rank")
    return b.one(
        o.TopologyLoss, gated.p, choices, gated.extras[RANKS], optional=real, to="topology", span=span,
        bandwidths=gate.bandwidths, **gate.places,
    )  # fmt: skip

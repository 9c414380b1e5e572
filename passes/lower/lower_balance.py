"""Lowers the balance terms of a mixture, one function per term."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moec.grammar.spec import (
    DeviceLoss,
    GShardLoss,
    ImportanceLoss,
    LoadLoss,
    Moa,
    Moe,
    SequenceLoss,
    SwitchLoss,
    TopK,
    ZLoss,
)
from moec.grammar.spec.base import Node
from moec.passes.ir import ops as o
from moec.passes.ir.attribute_types import RoutingGroup
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates import Gated
from moec.passes.lower.gates.placed_topology import PlacedTopology
from moec.passes.lower.gates.topology_gate import topology_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The results of a mixture's gate, and `e`, its choices with −1 for padding tokens.

    `kept` are the choices that the experts get: `e`, or fewer where a capacity has queues of texts or in another order
    than that of tokens. `real` names the marks of real tokens in a model with a padding id. `segments` names the
    segments of the tokens where each is a routing group, else None. `outer` are the choices of outer experts in a
    mixture of mixtures, which balance terms count. `chosen_w` are the weights of `e` before drops, where reroutes or
    renormalisation have changed `gated.w`; else None.
    """

    gated: Gated
    e: str
    kept: str
    experts: int
    real: tuple[str, ...]
    segments: str | None = None
    outer: str | None = None
    chosen_w: str | None = None

    @property
    def some_are_none(self) -> bool:
        """Whether a choice may be −1."""
        return bool(self.real) or self.gated.some_are_none

    @property
    def real_operand(self) -> dict[str, str]:
        """The optional operand `real` of a balance term."""
        return dict(zip(("real",), self.real, strict=False))


def balance_terms(b: Builder, moe: Moe | Moa, routed: Routed) -> list[str]:
    """The weighted balance terms of a mixture, of experts or of heads, and its gate's own terms, as one scalar, a sum
    over tokens; nothing without."""
    gate_terms = [*routed.gated.terms, *_gate_terms(b, moe.gate, routed)]
    layer_terms = [term for term in moe.balance if getattr(term, "over", "layer") == "layer"]
    if not layer_terms and not gate_terms:
        return []
    terms = [_LOWERED[type(term)](b, moe, term, routed) for term in layer_terms] + [name for name, _ in gate_terms]
    weights = (*(term.weight for term in layer_terms), *(weight for _, weight in gate_terms))
    span = moe.span("balance") or moe.gate.span()
    return [b.one(o.WeightedSum, *terms, to="balance", span=span, weights=weights)]


def _gate_terms(b: Builder, gate: Node, routed: Routed) -> Iterator[tuple[str, float]]:
    """The term of a gate over its choices, or over those that replace them in a replay."""
    if isinstance(gate, PlacedTopology) and gate.weight:
        yield topology_loss(b, gate, routed.gated, routed.e, routed.real_operand), gate.weight


def _switch_loss(b: Builder, moe: Moe | Moa, term: Node, routed: Routed) -> str:
    assert isinstance(term, SwitchLoss)
    return _loss_of_choices(b, moe.group, term, routed, counted_by(b, term, routed))


def counted_by(b: Builder, term: SwitchLoss, routed: Routed) -> str:
    """The experts whose loads a term counts: choices, or largest scores."""
    return _largest_scores(b, term, routed) if term.fractions == "scores" else routed.outer or routed.e


def _gshard_loss(b: Builder, moe: Moe | Moa, term: Node, routed: Routed) -> str:
    return _loss_of_choices(b, moe.group, term, routed, b.one(o.FirstChoices, routed.e, to="first", span=term.span()))


def _loss_of_choices(b: Builder, group: RoutingGroup, term: Node, routed: Routed, e: str) -> str:
    """`E · Σ fᵢ·Pᵢ` over each group, with fᵢ the share of the choices `e`."""
    p, span, to = routed.gated.p, term.span(), str(term.word)
    assert p is not None, "the language refuses a term over what the gate does not give"
    if routed.segments is not None:
        experts, segments = routed.experts, routed.segments
        choices = b.one(o.CountInSegments, e, segments, to="choices", span=span, num_experts=experts)
        return b.one(o.SegmentLoss, p, choices, segments, optional=routed.real_operand, to=to, span=span)
    choices = b.one(o.CountChoices, e, to="choices", span=span, num_experts=routed.experts, group=group)
    return b.one(o.SwitchLoss, p, choices, optional=routed.real_operand, to=to, span=span, group=group)


def _importance_loss(b: Builder, moe: Moe | Moa, term: Node, routed: Routed) -> str:
    assert isinstance(term, ImportanceLoss)
    w, span = routed.chosen_w or routed.gated.w, term.span()
    if term.of == "all":
        return _variation(b, moe, term, routed, _before_noise(b, moe, routed))
    return _variation(
        b, moe, term, routed, b.one(o.ExpertWeights, w, routed.e, to="parts", span=span, num_experts=routed.experts)
    )


def _before_noise(b: Builder, moe: Moe | Moa, routed: Routed) -> str:
    """The probabilities of all experts without the noise that a gate adds to its logits in training."""
    p, clean, score = routed.gated.p, routed.gated.extras.get("clean"), getattr(moe.gate, "score", "softmax")
    assert p is not None, "the language refuses a term over what the gate does not give"
    if clean is None:
        return p
    p, *_ = b.add(
        o.Route, clean, to="clean_p best best_expert", span=moe.gate.span(),
        k=1, score=score, order="before", normalize=False,
    )  # fmt: skip
    return p


def _load_loss(b: Builder, moe: Moe | Moa, term: Node, routed: Routed) -> str:
    assert isinstance(term, LoadLoss)
    gated, gate = routed.gated, moe.gate
    assert gated.logits is not None, "the language refuses a term over what the gate does not give"
    if term.of == "probabilities":
        assert isinstance(gate, TopK), "the language refuses other gates"
        p, span = _before_noise(b, moe, routed), term.span()
        loads = b.one(o.LoadsAbove, p, gated.logits, gated.e, to="parts", span=span, deviation=gate.noise)
        return _variation(b, moe, term, routed, loads)
    clean, deviation = (gated.extras[name] for name in ("clean", "deviation"))
    loads = b.one(o.ExpectedLoads, clean, gated.logits, deviation, gated.e, to="parts", span=term.span())
    return _variation(b, moe, term, routed, loads)


def _variation(b: Builder, moe: Moe | Moa, term: Node, routed: Routed, parts: str) -> str:
    """The squared coefficient of variation of the experts' `parts`, summed over each routing group."""
    span, real = term.span(), routed.real_operand
    totals = b.one(o.GroupTotals, parts, optional=real, to="totals", span=span, group=moe.group)
    return b.one(o.VariationLoss, parts, totals, optional=real, to=str(term.word), span=span, group=moe.group)


def _sequence_loss(b: Builder, moe: Moe | Moa, term: Node, routed: Routed) -> str:
    """The switch loss of each sequence, over the k largest scores: DeepSeek-V3, eq. 17 to 20."""
    return _loss_of_choices(b, "sequence", term, routed, _largest_scores(b, term, routed))


def _largest_scores(b: Builder, term: Node, routed: Routed) -> str:
    """The experts of each token's k largest scores: its choices, unless biases or groups choose too."""
    gated, span = routed.gated, term.span()
    scores = gated.logits or gated.p
    assert scores is not None, "the language refuses a term over what the gate does not give"
    if gated.by_scores:
        return routed.e
    k = b.scope[gated.e].shape[-1]
    largest = b.one(o.LargestScores, scores, to="largest", span=span, k=k)
    return b.one(o.MaskChoices, largest, *routed.real, to="largest", span=span) if routed.real else largest


def _device_loss(b: Builder, moe: Moe | Moa, term: Node, routed: Routed) -> str:
    """The switch loss of groups in place of experts: DeepSeekMoE, eq. 15 to 17, with D groups of E / D experts.

    f'_d · P'_d = (D / E) Σ (E / kT · count) · Σ P = (D / kT · Σ count) · Σ P, over the experts of group d.
    """
    assert isinstance(term, DeviceLoss)
    p, span, groups = routed.gated.p, term.span(), term.groups
    assert p is not None, "the language refuses a term over what the gate does not give"
    assert groups is not None, "the lowering of a model completes the term"
    choices = b.one(o.CountChoices, routed.e, to="choices", span=span, num_experts=routed.experts, group=moe.group)
    choices, p = (b.one(o.SumGroups, x, to=to, span=span, groups=groups) for x, to in ((choices, "choices"), (p, "p")))
    return b.one(o.SwitchLoss, p, choices, optional=routed.real_operand, to="device_loss", span=span, group=moe.group)


def _z_loss(b: Builder, moe: Moe | Moa, term: Node, routed: Routed) -> str:
    logits = routed.gated.logits
    assert logits is not None, "the language refuses a term over what the gate does not give"
    return b.one(o.ZLoss, logits, optional=routed.real_operand, to="z_loss", span=term.span())


_LOWERED: dict[type[Node], Callable[[Builder, Moe | Moa, Node, Routed], str]] = {
    DeviceLoss: _device_loss,
    GShardLoss: _gshard_loss,
    ImportanceLoss: _importance_loss,
    LoadLoss: _load_loss,
    SequenceLoss: _sequence_loss,
    SwitchLoss: _switch_loss,
    ZLoss: _z_loss,
}

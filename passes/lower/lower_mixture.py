"""Lowers a mixture of experts: its gate (`gates/`), its experts and its balance terms (`lower_balance.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moec.grammar.spec import Dropless, Factor, GShardLoss, Moe, Smear, Soft, Subject
from moec.passes.ir import Output, Role
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates import lower_gate
from moec.passes.lower.gates.gated import GateInputs
from moec.passes.lower.gates.smear_gate import smear_mixture
from moec.passes.lower.gates.soft_gate import soft_mixture
from moec.passes.lower.lower_balance import Routed, balance_terms
from moec.passes.lower.lower_experts import Sent, activated_weights, apply_experts
from moec.passes.lower.lower_feed_forward import add_dense_paths, scale_of, windows
from moec.passes.lower.lower_pooled import given_to_model
from moec.passes.lower.lower_queues import capacity_of, places_in_order, starts_of, varying, with_places
from moec.passes.lower.lower_replay import replayed


def mixture(
    b: Builder, subject: Subject, moe: Moe, h: str, by_role: Mapping[Role, str], *, replay: bool = False
) -> tuple[str, list[Output]]:
    """Returns the mixed value's name, and the outputs with counts of rows and of choices, balance terms, and choices.

    `smear` has no rows, and no counts. With `replay` the layer also takes choices, and gives those that were made
    before a capacity drops any. `by_role` names the layer's inputs beside the residual stream: `tokens` and `keys`
    where the gate takes them, `real` in a model with padding, `segments` where texts are packed.
    """
    if isinstance(moe.gate, Soft | Smear):
        return _without_choices(b, subject, moe, moe.gate, h, by_role)
    routed = _routed(b, subject, moe, h, by_role, replay)
    if len(moe.parts) > 1:
        mixed, counts = _in_parts(b, subject, moe, h, routed)
    else:
        in_texts = routed.segments is not None and moe.drops
        run = _dropless if isinstance(moe.capacity, Dropless) or in_texts else _padded
        mixed, counts = run(b, subject, moe, h, routed)
        mixed = b.scaled(mixed, scale_of(moe.parts[0].body), moe.parts[0].span())
    mixed = add_dense_paths(b, subject, moe, h, mixed)
    balance = (Output(name, "balance") for name in balance_terms(b, moe, routed))
    pooled = given_to_model(b, moe, routed)
    choices = (Output(routed.e, "choices"),) if replay else ()
    return mixed, [Output(counts, "counts"), *_made(b, moe, routed), *balance, *pooled, *choices]


def _made(b: Builder, moe: Moe, routed: Routed) -> list[Output]:
    """The number of choices before a capacity drops any, where it does not follow from the number of tokens."""
    if not (moe.drops and routed.gated.some_are_none):
        return []
    return [Output(b.one(o.CountMade, routed.e, to="made", span=moe.span("capacity")), "made")]


def _without_choices(
    b: Builder, subject: Subject, moe: Moe, gate: Soft | Smear, h: str, by_role: Mapping[Role, str]
) -> tuple[str, list[Output]]:
    """A mixture whose tokens choose no experts."""
    (part,), sent, counts = moe.parts, _sent(subject, moe, h), list[Output]()
    inputs = GateInputs(subject=subject, experts=part.count, h=h, by_role=by_role)
    if isinstance(gate, Soft):
        mixed, rows = soft_mixture(b, gate, inputs, lambda rows: apply_experts(b, replace(sent, rows=rows)))
        counts.append(Output(rows, "counts"))
    else:
        weights, biases, attributes = activated_weights(b, sent, shard={})
        mixed = smear_mixture(b, gate, inputs, weights, biases, attributes, part.span())
    mixed = b.scaled(mixed, scale_of(part.body), part.span())
    return add_dense_paths(b, subject, moe, h, mixed), counts


def _routed(b: Builder, subject: Subject, moe: Moe, h: str, by_role: Mapping[Role, str], replay: bool) -> Routed:
    inner = subject.within(moe.parts[0])
    ordered = moe.drops or any(isinstance(term, GShardLoss) for term in moe.balance)
    gated = lower_gate(b, subject, moe.gate, moe.num_experts, h, by_role, moe.group, inner, ordered)
    inner_k = 1 if inner is None else inner.gate.choices(inner.num_experts)
    choices = moe.gate.choices(moe.num_experts) * inner_k
    assert b.scope[gated.e].shape[-1] == choices, "rules of capacities count choices as the schema says"
    if replay:
        gated = replayed(b, gated, moe.gate.span())
    gated = gated.rounded(b, subject, moe.gate.span())
    e, real = gated.e, (by_role["real"],) if "real" in by_role else ()
    if real:
        e = b.one(o.MaskChoices, e, *real, to="e", span=moe.gate.span())
    segments = by_role.get("segments") if moe.group == "sequence" else None
    outer = None
    if inner is not None and moe.balance:
        span = moe.gate.span()
        outer = b.one(o.OuterChoices, e, to="outer", span=span, inner=inner.num_experts, inner_k=inner_k)
    routed = Routed(gated=gated, e=e, kept=e, experts=moe.num_experts, real=real, segments=segments, outer=outer)
    placed = with_places(b, moe, routed, by_role)
    if placed.gated.w == gated.w:
        return placed
    return replace(placed, gated=placed.gated.rounded(b, subject, moe.gate.span()))  # renormalised: new weights


def _dropless(b: Builder, subject: Subject, moe: Moe, h: str, routed: Routed) -> tuple[str, str]:
    """Computes one row for each kept choice."""
    some_are_none = routed.some_are_none or routed.kept != routed.e
    sent, inner_moe = _sent(subject, moe, h), subject.within(moe.parts[0])
    if inner_moe is not None:  # all pairs of an outer and an inner expert
        (inner,) = inner_moe.parts
        sent = replace(sent, experts=inner.replace(count=sent.experts.count * inner.count))
    return _ragged(b, moe, sent, routed.kept, routed.gated.w, some_are_none)


def _ragged(b: Builder, moe: Moe, sent: Sent, e: str, w: str, some_are_none: bool) -> tuple[str, str]:
    """The mixed tokens and the counts of one part of the experts. `sent.rows` are the tokens."""
    span = moe.span("capacity")
    rows, counts, positions = b.add(
        o.Permute, windows(b, sent.experts.body, sent.rows), e, to="rows counts positions", span=span,
        num_experts=sent.experts.count, some_are_none=some_are_none,
    )  # fmt: skip
    y = apply_experts(b, replace(sent, rows=rows, counts=counts))
    return b.one(o.Combine, y, positions, w, to="mixed", span=span), counts


def _in_parts(b: Builder, subject: Subject, moe: Moe, h: str, routed: Routed) -> tuple[str, str]:
    """Experts of several kinds or sizes: each part has its own rows, and the results are added.

    Choices that find no place are dropped before the parts: a capacity counts over all experts. Rows are ragged.
    """
    e, first_expert = _kept_choices(b, moe, routed), 0
    mixed, counts_of_parts = [], []
    for number, part in enumerate(moe.parts):
        selected = b.one(
            o.SelectExperts, e, to="selected", span=part.span(),
            first=first_expert, count=part.count, num_experts=routed.experts,
        )  # fmt: skip
        sent = Sent(subject=subject, experts=part, rows=h, counts=None, prefix=f"moe.experts.{number}")
        result, counts = _ragged(b, moe, sent, selected, routed.gated.w, True)
        mixed.append(b.scaled(result, scale_of(part.body), part.span()))
        counts_of_parts.append(counts)
        first_expert += part.count
    span = moe.span("experts")
    total = b.one(o.Add, *mixed, to="mixed", span=span)
    return total, b.one(o.ConcatCounts, *counts_of_parts, to="all_counts", span=span)


def _kept_choices(b: Builder, moe: Moe, routed: Routed) -> str:
    """The choices that find a place; −1 for those that are dropped."""
    if not moe.drops or routed.kept != routed.e:
        return routed.kept
    return places_in_order(b, moe, routed.e)


def _padded(b: Builder, subject: Subject, moe: Moe, h: str, routed: Routed) -> tuple[str, str]:
    """A fixed number of places for each expert, filled or not (GShard, Lepikhin et al. 2020, section 3.1)."""
    span, vectors = moe.span("capacity"), windows(b, moe.parts[0].body, h)
    if isinstance(moe.capacity, Factor):
        rows, counts, positions = b.add(
            o.PermutePadded, vectors, routed.kept, starts_of(b, moe, routed.kept), optional=varying(b, moe),
            to="rows counts positions", span=span, **capacity_of(moe),
        )  # fmt: skip
    else:
        kept = _kept_choices(b, moe, routed)
        places = b.one(o.LargestLoad, kept, to="places", span=span, num_experts=routed.experts)
        rows, counts, positions = b.add(
            o.PermuteDynamic, vectors, kept, places, to="rows counts positions", span=span, num_experts=routed.experts
        )
    y = apply_experts(b, _sent(subject, moe, rows))
    return b.one(o.CombinePadded, y, positions, routed.gated.w, to="mixed", span=span), counts


def _sent(subject: Subject, moe: Moe, rows: str) -> Sent:
    """Rows in places for the only part of the experts."""
    (part,) = moe.parts
    return Sent(
        subject=subject, experts=part, rows=rows, counts=None, prefix="moe.experts",
        all_places=moe.overflow == "pad", sliced=moe.gate.slices_experts,
    )  # fmt: skip

"""Lowers a mixture of experts: its gate (`gates/`), its experts and its balance terms (`lower_balance.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from moec.grammar.spec import (
    Dropless,
    Dynamic,
    Experts,
    Factor,
    Moe,
    Soft,
    Subject,
)
from moec.passes.ir import Output, Role
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates import lower_gate
from moec.passes.lower.gates.gated import Given
from moec.passes.lower.gates.soft_gate import soft_mixture
from moec.passes.lower.lower_balance import Routed, balance_terms
from moec.passes.lower.lower_experts import Sent, apply_experts
from moec.passes.lower.lower_feed_forward import beside_experts, scale_of
from moec.passes.lower.lower_queues import capacity_of, varying, with_places
from moec.passes.lower.lower_replay import replayed


def mixture(
    b: Builder, subject: Subject, moe: Moe, h: str, beside: Mapping[Role, str], *, replay: bool = False
) -> tuple[str, Output, *tuple[Output, ...]]:
    """Returns the mixed value's name, the counts of rows per expert, and the layer's balance term if it has one.

    With `replay` the layer also takes choices, and gives those that were made before a capacity drops any.

    `beside` names the layer's inputs beside the residual stream: `tokens` where the gate takes them, and `real` in a
    model with a padding id.
    """
    assert isinstance(moe.experts, Experts)
    scale, line = scale_of(moe.experts.body), moe.experts.span()
    if isinstance(moe.gate, Soft):
        given = Given(subject=subject, experts=moe.num_experts, h=h, beside=beside)
        mixed, counts = soft_mixture(b, moe.gate, given, lambda rows: apply_experts(b, _sent(subject, moe, rows)))
        return beside_experts(b, subject, moe, h, b.scaled(mixed, scale, line)), Output(counts, "counts")
    routed = _routed(b, subject, moe, h, beside, replay)
    in_texts = routed.segments is not None and moe.drops
    run = _dropless if isinstance(moe.capacity, Dropless) or in_texts else _padded
    mixed, counts = run(b, subject, moe, h, routed)
    mixed = b.scaled(mixed, scale, line)
    mixed = beside_experts(b, subject, moe, h, mixed)
    balance = (Output(name, "balance") for name in balance_terms(b, moe, routed))
    choices = (Output(routed.e, "choices"),) if replay else ()
    return mixed, Output(counts, "counts"), *balance, *choices


def _routed(b: Builder, subject: Subject, moe: Moe, h: str, beside: Mapping[Role, str], replay: bool) -> Routed:
    declared = moe.experts
    assert isinstance(declared, Experts)
    gated = lower_gate(b, subject, moe.gate, declared.count, h, beside, moe.group)
    if replay:
        gated = replayed(b, gated, moe.gate.span())
    e, real = gated.e, (beside["real"],) if "real" in beside else ()
    if real:
        e = b.one(o.MaskChoices, e, *real, to="e", span=moe.gate.span())
    segments = beside.get("segments") if moe.group == "sequence" else None
    routed = Routed(gated=gated, e=e, kept=e, experts=declared.count, real=real, segments=segments)
    return with_places(b, moe, routed, beside)


def _dropless(b: Builder, subject: Subject, moe: Moe, h: str, routed: Routed) -> tuple[str, str]:
    """As many rows as there are choices that are kept."""
    span = moe.span("capacity")
    rows, counts, positions = b.add(
        o.Permute, h, routed.kept, to="rows counts positions", span=span,
        num_experts=routed.experts, some_are_none=routed.some_are_none or routed.kept != routed.e,
    )  # fmt: skip
    y = apply_experts(b, _sent(subject, moe, rows, counts))
    return b.one(o.Combine, y, positions, routed.gated.w, to="mixed", span=span), counts


def _padded(b: Builder, subject: Subject, moe: Moe, h: str, routed: Routed) -> tuple[str, str]:
    """A fixed number of places for each expert, filled or not (GShard, Lepikhin et al. 2020, section 3.1)."""
    capacity, span, experts, chosen = moe.capacity, moe.span("capacity"), routed.experts, routed.kept

    def starts() -> str:
        queues = b.one(o.CountQueues, chosen, to="queues", span=span, num_experts=experts)
        return b.one(o.QueueStarts, queues, to="starts", span=span, group=moe.group)

    if isinstance(capacity, Factor):
        rows, counts, positions = b.add(
            o.PermutePadded, h, chosen, starts(), beside=varying(b, moe), to="rows counts positions", span=span,
            **capacity_of(moe),
        )  # fmt: skip
    else:
        assert isinstance(capacity, Dynamic)
        if capacity.max is not None and chosen == routed.e:
            chosen = b.one(o.KeepChoices, chosen, starts(), to="kept", span=span, **capacity_of(moe))
        places = b.one(o.LargestLoad, chosen, to="places", span=span, num_experts=experts)
        rows, counts, positions = b.add(
            o.PermuteDynamic, h, chosen, places, to="rows counts positions", span=span, num_experts=experts
        )
    y = apply_experts(b, _sent(subject, moe, rows))
    return b.one(o.CombinePadded, y, positions, routed.gated.w, to="mixed", span=span), counts


def _sent(subject: Subject, moe: Moe, rows: str, counts: str | None = None) -> Sent:
    assert isinstance(moe.experts, Experts)
    return Sent(
        subject=subject,
        experts=moe.experts,
        rows=rows,
        counts=counts,
        prefix="moe.experts",
        all_places=moe.overflow == "pad",
    )

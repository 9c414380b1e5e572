"""Lowers a mixture of experts: its gate (`gates/`), its experts and its balance terms (`lower_balance.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moec.grammar.source import Span
from moec.grammar.spec import (
    Activated,
    Dropless,
    Dynamic,
    Experts,
    Factor,
    Moe,
    Subject,
)
from moec.passes.ir import Init, Matrices, Output, Role
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.lower.block_builder import Builder, normal, residual_init
from moec.passes.lower.gates import lower_gate
from moec.passes.lower.lower_balance import Routed, balance_terms
from moec.passes.lower.lower_feed_forward import beside_experts, parameters_of
from moec.passes.lower.lower_queues import capacity_of, varying, with_places
from moec.passes.lower.lower_replay import replayed

UP, DOWN, EXPERTS = Matrices(2, 1, hidden=True), Matrices(1, 1, hidden=True), Matrices(1)
"""The experts' weights and biases: every expert is a matrix of its own, and so is each half of a gated `up`."""


def mixture(
    b: Builder, subject: Subject, moe: Moe, h: str, beside: Mapping[Role, str], *, replay: bool = False
) -> tuple[str, Output, *tuple[Output, ...]]:
    """Returns the mixed value's name, the counts of rows per expert, and the layer's balance term if it has one.

    With `replay` the layer also takes choices, and gives those that were made before a capacity drops any.

    `beside` names the layer's inputs beside the residual stream: `tokens` where the gate takes them, and `real` in a
    model with a padding id.
    """
    routed = _routed(b, subject, moe, h, beside, replay)
    run = _dropless if isinstance(moe.capacity, Dropless) else _padded
    mixed, counts = run(b, subject, moe, h, routed)
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
    routed = Routed(gated=gated, e=e, kept=e, experts=declared.count, real=real)
    return with_places(b, moe, routed, beside)


def _expert_weights(b: Builder, subject: Subject, moe: Moe) -> tuple[tuple[str, str], dict[str, str], dict[str, Any]]:
    """The names of the up and down weights, of their biases (if any), and the activation as attributes of ops."""
    declared = moe.experts
    assert isinstance(declared, Experts)
    body, span = declared.body, declared.span()
    assert isinstance(body, Activated)
    attributes: dict[str, Any] = {"activation": body.word, **parameters_of(body)}
    shard = {"ep": 0}
    up_shape = (declared.count, ACTIVATIONS[body.word].parts, body.hidden, subject.dim)
    up = b.parameter("moe.experts.up.weight", up_shape, subject.dtype, normal(), span, shard, UP)
    down_shape, init = (declared.count, subject.dim, body.hidden), residual_init(subject.depth)
    down = b.parameter("moe.experts.down.weight", down_shape, subject.dtype, init, span, shard, DOWN)
    if not body.bias:
        return (up, down), {}, attributes
    zeros, span = Init(kind="zeros"), body.span("bias")
    up_bias = b.parameter("moe.experts.up.bias", up_shape[:-1], subject.dtype, zeros, span, shard, EXPERTS)
    down_bias = b.parameter("moe.experts.down.bias", down_shape[:-1], subject.dtype, zeros, span, shard, EXPERTS)
    return (up, down), {"up_bias": up_bias, "down_bias": down_bias}, attributes


def _dropless(b: Builder, subject: Subject, moe: Moe, h: str, routed: Routed) -> tuple[str, str]:
    span = moe.span("capacity")
    rows, counts, positions = b.add(
        o.Permute, h, routed.e, to="rows counts positions", span=span,
        num_experts=routed.experts, some_are_none=routed.some_are_none,
    )  # fmt: skip
    (up, down), biases, activation = _expert_weights(b, subject, moe)
    y = b.one(o.ExpertMlp, rows, counts, up, down, beside=biases, to="y", span=_declared(moe), **activation)
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
    (up, down), biases, activation = _expert_weights(b, subject, moe)
    y = b.one(
        o.ExpertMlpPadded, rows, up, down, beside=biases, to="y", span=_declared(moe),
        all_places=moe.overflow == "pad", **activation,
    )  # fmt: skip
    return b.one(o.CombinePadded, y, positions, routed.gated.w, to="mixed", span=span), counts


def _declared(moe: Moe) -> Span | None:
    assert isinstance(moe.experts, Experts)
    return moe.experts.span()

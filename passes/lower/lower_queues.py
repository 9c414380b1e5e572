"""Lowers capacities whose queues are in another order than that of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moec.grammar.spec import Dynamic, Factor, Moe
from moec.passes.ir import TRAINING, Role
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.lower_balance import Routed

QUEUES = 1
"""The stream of random numbers of a queue's order; `jitter` has the stream 0."""


def capacity_of(moe: Moe) -> dict[str, Any]:
    """The attributes of an op with the capacity of a mixture that drops choices."""
    capacity = moe.capacity
    if isinstance(capacity, Factor):
        factor, evaluated, least = capacity.factor, capacity.eval or capacity.factor, capacity.min
    else:
        assert isinstance(capacity, Dynamic)
        assert capacity.max is not None
        factor, evaluated, least = capacity.max, capacity.max, 1
    return {
        "group": moe.group,
        "parts": factor.numerator,
        "whole": factor.denominator,
        "eval_parts": evaluated.numerator,
        "eval_whole": evaluated.denominator,
        "least": least,
    }


def varying(b: Builder, moe: Moe) -> dict[str, str]:
    """The optional operand `training` of an op whose capacity differs in evaluation."""
    how = capacity_of(moe)
    differs = how["parts"] * how["eval_whole"] != how["eval_parts"] * how["whole"]
    return {"training": b.setting(TRAINING)} if differs else {}


def choices_in_order(b: Builder, moe: Moe, routed: Routed, beside: Mapping[Role, str]) -> str:
    """The choices, those that the capacity drops replaced by −1 if queues are not in token order."""
    if moe.order == "sequence":
        return routed.e
    span = moe.capacity.span("order") or moe.span("capacity")
    return b.one(
        o.KeepFirst, routed.e, _priorities(b, moe, routed, beside), beside=varying(b, moe), to="kept", span=span,
        num_experts=routed.experts, **capacity_of(moe),
    )  # fmt: skip


def _priorities(b: Builder, moe: Moe, routed: Routed, beside: Mapping[Role, str]) -> str:
    span = moe.capacity.span("order") or moe.gate.span()
    if moe.order == "priority":
        scores = routed.gated.p or routed.gated.w
        return b.one(o.BestScore, scores, to="priorities", span=span)
    training = b.setting(TRAINING)
    return b.one(o.RandomOrder, beside["keys"], training, to="priorities", span=span, stream=QUEUES)

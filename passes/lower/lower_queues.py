"""Lowers capacities whose queues are in another order than that of tokens, and reroutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moec.grammar.spec import Dynamic, Factor, Moe, Online
from moec.passes.ir import TRAINING, Role
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates import BIAS
from moec.passes.lower.lower_balance import Routed

QUEUES = 7
"""The stream of random numbers for the order of queues; no gate has this stream."""


def capacity_of(moe: Moe) -> dict[str, Any]:
    """The attributes of an op with the capacity of a mixture that drops choices."""
    capacity = moe.capacity
    if isinstance(capacity, Factor):
        factor, eval_factor, minimum = capacity.factor, capacity.eval or capacity.factor, capacity.min
    else:
        assert isinstance(capacity, Dynamic)
        assert capacity.max is not None
        factor, eval_factor, minimum = capacity.max, capacity.max, 1
    return {
        "group": moe.group,
        "parts": factor.numerator,
        "whole": factor.denominator,
        "eval_parts": eval_factor.numerator,
        "eval_whole": eval_factor.denominator,
        "least": minimum,
    }


def varying(b: Builder, moe: Moe) -> dict[str, str]:
    """The optional operand `training` of an op whose capacity differs in evaluation."""
    capacity = capacity_of(moe)
    differs = capacity["parts"] * capacity["eval_whole"] != capacity["eval_parts"] * capacity["whole"]
    return {"training": b.setting(TRAINING)} if differs else {}


def with_places(b: Builder, moe: Moe, routed: Routed, by_role: Mapping[Role, str]) -> Routed:
    """The choices after drops, where an op beside the permutation drops them: in queues of texts or in another order
    than that of tokens, by reroutes, and where the kept weights are divided by their sum."""
    placed, capacity = _placed(b, moe, routed, by_role), moe.capacity
    if not (isinstance(capacity, Factor) and capacity.renormalize):
        return placed
    kept = places_in_order(b, moe, placed.e) if placed.kept == placed.e else placed.kept
    scale = getattr(moe.gate, "scale", 1.0)
    span = capacity.span("renormalize")
    w = b.one(o.Renormalize, placed.gated.w, kept, to="w", span=span, scale=scale)
    return replace(placed, kept=kept, chosen_w=placed.chosen_w or placed.gated.w, gated=replace(placed.gated, w=w))


def starts_of(b: Builder, moe: Moe, e: str) -> str:
    """The start of each piece's choices in the queues of experts."""
    span = moe.span("capacity")
    queues = b.one(o.CountQueues, e, to="queues", span=span, num_experts=moe.num_experts)
    return b.one(o.QueueStarts, queues, to="starts", span=span, group=moe.group)


def places_in_order(b: Builder, moe: Moe, e: str) -> str:
    """The choices that find a place, in the order of tokens; −1 for those that are dropped."""
    return b.one(
        o.KeepChoices, e, starts_of(b, moe, e), optional=varying(b, moe), to="kept",
        span=moe.span("capacity"), **capacity_of(moe),
    )  # fmt: skip


def _placed(b: Builder, moe: Moe, routed: Routed, by_role: Mapping[Role, str]) -> Routed:
    capacity, attributes = moe.capacity, capacity_of(moe) if moe.drops else {}
    if moe.drops and routed.segments is not None:
        return replace(routed, kept=_kept_in_segments(b, moe, routed, routed.segments))
    if moe.order in ("weight", "token"):
        return replace(routed, kept=_best(b, moe, routed))
    priorities = {"priorities": _priorities(b, moe, routed, by_role)} if moe.order != "sequence" else {}
    if moe.overflow == "reroute":
        return _rerouted(b, moe, routed, priorities)
    if not priorities:
        return routed
    kept = b.one(
        o.KeepFirst, routed.e, *priorities.values(), optional=varying(b, moe), to="kept",
        span=capacity.span("order") or moe.span("capacity"), num_experts=routed.experts, **attributes,
    )  # fmt: skip
    return replace(routed, kept=kept)


def _kept_in_segments(b: Builder, moe: Moe, routed: Routed, segments: str) -> str:
    """The name of the choices, −1 for those beyond the capacity of their segment."""
    attributes = {name: value for name, value in capacity_of(moe).items() if name != "group"}
    return b.one(
        o.KeepInSegments, routed.e, segments, optional=varying(b, moe), to="kept", span=moe.span("capacity"),
        num_experts=routed.experts, **attributes,
    )  # fmt: skip


def _best(b: Builder, moe: Moe, routed: Routed) -> str:
    """The name of the choices, −1 for those beyond the capacity: by their own weights, or token by token."""
    assert moe.overflow != "reroute", "the language refuses reroutes in such an order"
    priorities = {"priorities": routed.gated.w} if moe.order == "weight" else {}
    return b.one(
        o.KeepBest, routed.e, optional={**priorities, **varying(b, moe)}, to="kept", span=moe.capacity.span("order"),
        num_experts=routed.experts, **capacity_of(moe),
    )  # fmt: skip


def _rerouted(b: Builder, moe: Moe, routed: Routed, priorities: Mapping[str, str]) -> Routed:
    """The gate's rule weighs the experts that the choices got; for a dropped choice, its first expert."""
    gate, span, logits = moe.gate, moe.span("overflow"), routed.gated.logits
    assert logits is not None, "the language refuses reroutes of other gates"
    bias = {"bias": f"^{BIAS}"} if isinstance(getattr(gate, "bias", None), Online) else {}
    rule: dict[str, Any] = {name: getattr(gate, name, default) for name, default in _RULE.items()}
    kept, scored = b.add(
        o.Reroute, logits, routed.e, optional={**priorities, **bias, **varying(b, moe)}, to="rerouted scored",
        span=span, score=rule["score"], **capacity_of(moe),
    )  # fmt: skip
    weights = b.one(o.ChosenWeights, logits, scored, to="w", span=span, **rule)
    return replace(routed, kept=kept, chosen_w=routed.gated.w, gated=replace(routed.gated, w=weights))


_RULE = {"score": "softmax", "order": "before", "normalize": False, "scale": 1.0}
"""The options by which a gate weighs choices, with the values of `switch` and `batch_priority`."""


def _priorities(b: Builder, moe: Moe, routed: Routed, by_role: Mapping[Role, str]) -> str:
    span = moe.capacity.span("order") or moe.gate.span()
    scores = routed.gated.p or routed.gated.w
    if moe.order == "random":  # equal numbers in evaluation
        keys, training = by_role["keys"], b.setting(TRAINING)
        scores = b.one(o.Uniform, keys, training, to="numbers", span=span, count=1, stream=QUEUES)
    return b.one(o.BestScore, scores, to="priorities", span=span)

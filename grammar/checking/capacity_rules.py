"""Warnings about capacities: options without effect, and later tokens that take places of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.spec import BatchPriority, Dropless, Dynamic, Factor, Moe, Spec, Switch, TopK
from moec.grammar.spec.balance import PlaceOrder
from moec.grammar.units import written


def capacities(spec: Spec) -> list[Diagnostic]:
    """Every warning about a capacity of the file's model or layer, once for all layers with the same mixture.

    If the gate decides how many rows an expert takes, the gate's rules refuse a capacity. A `layer` file has no
    causality warning: only its host knows whether the model is causal.
    """
    causal = spec.has_model and all(getattr(layer.attention, "causal", True) for layer in spec.model.layers)
    mixtures = [layer.moe for layer in (spec.model.layers if spec.has_model else spec.layers)]
    problems: list[Diagnostic] = []
    for moe in {id(moe): moe for moe in mixtures if moe and not moe.gate.decides_rows}.values():
        problems += _evaluation(spec, moe)
        problems += _order(moe)
        problems += _renormalized(moe)
        problems += _overflow(moe)
        problems += _causality(spec, moe) if causal else ()
    return list(dict.fromkeys(problems))


def _evaluation(spec: Spec, moe: Moe) -> Iterator[Diagnostic]:
    """Warns where `min` makes the evaluation capacity useless, if the number of a group's tokens is known."""
    capacity, tokens = moe.capacity, _tokens_in_training(spec, moe)
    if not isinstance(capacity, Factor) or capacity.eval is None or tokens is None:
        return
    k = moe.gate.choices(moe.num_experts)
    places = math.ceil(capacity.eval * k * tokens / moe.num_experts)
    if places < capacity.min:
        factor = written(capacity.eval, "")
        yield diagnose(
            "MOE0320",
            capacity.span("eval"),
            f"{k * tokens} choices of {moe.num_experts} experts make {places} places with {factor}",
            labels=labels_at((capacity.span("min"), f"there are at least {capacity.min}")),
            help="leave `eval` out, or lower `min`",
            severity=Severity.WARNING,
        )


def _order(moe: Moe) -> Iterator[Diagnostic]:
    """Warns of an order of places if nothing is dropped; refuses two orders."""
    capacity, by_gate = moe.capacity, isinstance(moe.gate, BatchPriority)
    stated = None if isinstance(capacity, Dropless) else capacity.order
    span = moe.gate.span() if by_gate else capacity.span("order")
    if not moe.drops and (by_gate or stated not in (None, "sequence")):
        message = "each expert has as many places as it needs"
        help = "give a capacity that drops choices: `factor(1.25)`" if by_gate else "leave it out, or give `max`"
        yield diagnose("MOE0351", span, message, help=help, severity=Severity.WARNING)
    elif by_gate and capacity.given("order") and stated != "priority":
        labels = labels_at((span, "this gate's order is `priority`"))
        help = "leave `order` out, or use the gate `topk`"
        yield diagnose("MOE0354", capacity.span("order"), f"`order = {stated}`", labels=labels, help=help)


def _renormalized(moe: Moe) -> Iterator[Diagnostic]:
    """Warns of weights that are 1 whatever the router computes, because each token has one choice."""
    capacity, gate = moe.capacity, moe.gate
    if not (isinstance(capacity, Factor) and capacity.renormalize) or gate.choices(moe.num_experts) != 1:
        return
    if "logits" in gate.gives and moe.num_experts > 1:
        message, help = "of one choice this makes every weight 1", "leave it out, as DeepSpeed does for `k = 1`"
        labels = labels_at((gate.span("k") or gate.span(), "each token makes one choice"))
        yield diagnose(
            "MOE0321", capacity.span("renormalize"), message, labels=labels, help=help, severity=Severity.WARNING
        )


def _overflow(moe: Moe) -> Iterator[Diagnostic]:
    """`reroute` and `pad` need a capacity; `reroute` also the logits of all experts."""
    word, capacity, gate = moe.overflow, moe.capacity, moe.gate
    if word == "drop" or gate.decides_rows:  # `group_gates` refuses it there
        return
    if not moe.drops or (word == "pad" and not isinstance(capacity, Factor)):
        message = "no expert is ever full" if not moe.drops else "the number of places changes from step to step"
        labels = labels_at((moe.span("capacity"), f"of `{capacity.word}`" if moe.given("capacity") else ""))
        help = "give the number of places: `capacity = factor(1.25)`"
        yield diagnose("MOE0350", moe.span("overflow"), message, labels=labels, help=help)
    if word != "reroute":
        return
    if not isinstance(gate, TopK | Switch | BatchPriority):
        message = f"`{gate.word}` has no next best expert"
        help = "gates with reroutes: topk, switch, batch_priority"
        yield diagnose(
            "MOE0354", moe.span("overflow"), message, labels=labels_at((gate.span(), "this gate")), help=help
        )
    elif moe.order in ("weight", "token"):
        message, there = (
            f"`order = {moe.order}`",
            labels_at((moe.span("overflow"), "moec cannot yet reroute in this order")),
        )
        help = "orders of reroutes: sequence, priority, random"
        yield diagnose("MOE0354", capacity.span("order"), message, labels=there, help=help)
    elif isinstance(gate, TopK):
        limits = {"bias": gate.bias == "learned", "noise": gate.noise > 0, "groups": gate.keep_groups is not None}
        for option in [name for name, is_given in limits.items() if is_given]:
            message = f"moec cannot yet rank experts by `{option}` when it reroutes"
            yield diagnose(
                "MOE0354", gate.span(option), message, labels=labels_at((moe.span("overflow"), "reroutes here"))
            )


def _causality(spec: Spec, moe: Moe) -> Iterator[Diagnostic]:
    """Warns if later tokens decide which choices of earlier tokens a capacity drops.

    In token order only second choices queue behind those of later tokens, unless they have experts of their own; token
    by token none do. By priority, by weight, or at random in training, first choices queue behind them too.
    """
    capacity, k = moe.capacity, moe.gate.choices(moe.num_experts)
    second = k > 1 and not moe.gate.by_expert
    match capacity:
        case Factor():
            factors, least = (capacity.factor, capacity.eval or capacity.factor), capacity.min
        case Dynamic(max=Fraction() as most):
            factors, least = (most, most), 1
        case _:
            return
    tokens = (_tokens_in_training(spec, moe), _tokens_in_evaluation(spec, moe))
    reroutes = moe.overflow == "reroute"
    behind_later = (True, True) if reroutes else _BEHIND_LATER[moe.order](second)
    dropping = [
        mode
        for mode, behind, factor, of_group in zip(
            ("training", "evaluation"), behind_later, factors, tokens, strict=True
        )
        if behind and _drops(factor * k / moe.num_experts, least, of_group)
    ]
    if not dropping:
        return
    modes = " and ".join(dropping)
    if reroutes:
        message = f"in {modes} a choice finds another expert only where no later token took the last place"
        labels = labels_at((moe.span("overflow"), "after the choices of all tokens"))
        help = (
            "`dropless` and `dynamic()` drop nothing; `topk(1)` with `overflow = drop` lets only earlier tokens decide"
        )
    elif moe.order == "sequence":
        message = f"in {modes} it can drop second choices, which queue behind all first ones"
        labels = labels_at((moe.gate.span("k") or moe.gate.span(), f"each token makes {k} choices"))
        help = "`dropless` and `dynamic()` drop nothing; `order = token` and `topk(1)` let only earlier tokens decide"
    else:
        message = f"in {modes} it can drop choices, which queue behind those of later tokens"
        by_gate = isinstance(moe.gate, BatchPriority)
        labels = labels_at(
            (
                moe.gate.span() if by_gate else capacity.span("order"),
                "a token's place in the queue is not its place in the sequence",
            )
        )
        help = (
            "`dropless` and `dynamic()` drop nothing; `topk(1)` with `order = sequence` lets only earlier tokens decide"
        )
    yield diagnose("MOE0322", moe.span("capacity"), message, labels=labels, help=help, severity=Severity.WARNING)


_BEHIND_LATER: dict[PlaceOrder, Callable[[bool], tuple[bool, bool]]] = {
    "sequence": lambda second: (second, second),
    "random": lambda second: (True, second),
    "priority": lambda second: (True, True),
    "weight": lambda second: (True, True),
    "token": lambda second: (False, False),
}
"""By order of places, functions that say whether choices queue behind those of later tokens, in training and in
evaluation. Their argument: whether second choices, which share experts with first ones, do so in token order."""


def _drops(places_per_token: Fraction, least: int, tokens: int | None) -> bool:
    """Whether an expert has fewer places than a group has tokens, each of which chooses it at most once."""
    if tokens is None:
        return places_per_token < 1
    return max(least, math.ceil(places_per_token * tokens)) < tokens


def _tokens_in_training(spec: Spec, moe: Moe) -> int | None:
    sequence = spec.sequence
    if _packs(spec, moe):
        return None
    if moe.group == "sequence" or sequence is None:
        return sequence
    if moe.group != "batch" or spec.train is None:
        return None
    parts = spec.parallel.microbatches
    return sequence * spec.train.batch // (parts if isinstance(parts, int) else 1)


def _tokens_in_evaluation(spec: Spec, moe: Moe) -> int | None:
    """The most tokens of a group; None where a group spans sequences, as batches have any size in evaluation."""
    if moe.group != "sequence" or _packs(spec, moe):
        return None
    return spec.model.length or spec.model.context or (spec.train.sequence if spec.train else None)


def _packs(spec: Spec, moe: Moe) -> bool:
    """Whether a group is one of several texts of a sequence, which may have any length."""
    return moe.group == "sequence" and spec.has_model and spec.model.embedding.packs

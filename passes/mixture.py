"""Lowers a mixture of experts: its gate, its experts and its balance terms."""

from __future__ import annotations

from dataclasses import dataclass

from moec.grammar.source import Span
from moec.grammar.spec import (
    Activated,
    Dropless,
    Dynamic,
    Experts,
    Factor,
    Moe,
    Spec,
    Subject,
    Switch,
    SwitchLoss,
    TopK,
)
from moec.passes.builder import Builder, normal, residual_init
from moec.passes.feed_forward import activation_of, beside_experts
from moec.passes.ir import TRAINING, Init
from moec.passes.ir import ops as o


@dataclass(frozen=True, slots=True)
class _Routed:
    """What the gate gives: names of logits, probabilities `p`, weights `w`, expert ids `e`; how many experts, and k.

    `real` names the value that marks real tokens, in a model that has a padding id; `e` is −1 for padding.
    """

    logits: str
    p: str
    w: str
    e: str
    experts: int
    k: int
    real: tuple[str, ...]


def mixture(b: Builder, subject: Subject, moe: Moe, h: str, real: tuple[str, ...] = ()) -> tuple[str, list[str], str]:
    """The mixed value, the layer's balance term where it has one, and the counts of rows per expert.

    `real` names the value that marks real tokens; without it all are real.
    """
    routed = _gate(b, subject, moe, h, real)
    run = _dropless if isinstance(moe.capacity, Dropless) else _padded
    mixed, counts = run(b, subject, moe, h, routed)
    mixed = beside_experts(b, subject, moe, h, mixed)
    return mixed, _balance(b, moe, routed), counts


def choices_per_token(spec: Spec, layer: int) -> int:
    """How many experts a token of layer `layer`, a mixture, chooses."""
    moe = (spec.model.layers[layer] if spec.has_model else spec.layer).moe
    assert moe is not None
    return moe.gate.k if isinstance(moe.gate, TopK) else 1


def _gate(b: Builder, subject: Subject, moe: Moe, h: str, real: tuple[str, ...]) -> _Routed:
    gate, declared = moe.gate, moe.experts
    if isinstance(gate, Switch):
        gate = TopK(k=1).with_spans({"": span} if (span := gate.span()) else {})
    assert isinstance(gate, TopK)
    assert isinstance(declared, Experts)
    weight = b.parameter("moe.gate.weight", (declared.count, subject.dim), subject.dtype, normal(), gate.span())
    logits = b.one(o.Router, h, weight, to="logits", span=gate.span())
    p, w, e = b.add(
        o.Route, logits, to="p w e", span=gate.span(),
        k=gate.k, score=gate.score, order=gate.order, normalize=gate.normalize,
    )  # fmt: skip
    if real:
        e = b.one(o.MaskChoices, e, *real, to="e", span=gate.span())
    return _Routed(logits, p, w, e, declared.count, gate.k, real)


def _expert_weights(b: Builder, subject: Subject, moe: Moe) -> tuple[tuple[str, ...], str]:
    """The names of the up and down weights, and of their biases where there are any; and the activation."""
    declared = moe.experts
    assert isinstance(declared, Experts)
    body, span = declared.body, declared.span()
    assert isinstance(body, Activated)
    activation = activation_of(body)
    up_shape = (declared.count, activation.parts, body.hidden, subject.dim)
    up = b.parameter("moe.experts.up.weight", up_shape, subject.dtype, normal(), span)
    down_shape = (declared.count, subject.dim, body.hidden)
    down = b.parameter("moe.experts.down.weight", down_shape, subject.dtype, residual_init(subject.depth), span)
    if not body.bias:
        return (up, down), activation.word
    zeros, span = Init(kind="zeros"), body.span("bias")
    up_bias = b.parameter("moe.experts.up.bias", up_shape[:-1], subject.dtype, zeros, span)
    down_bias = b.parameter("moe.experts.down.bias", down_shape[:-1], subject.dtype, zeros, span)
    return (up, down, up_bias, down_bias), activation.word


def _dropless(b: Builder, subject: Subject, moe: Moe, h: str, routed: _Routed) -> tuple[str, str]:
    span = moe.span("capacity")
    permute = o.PermuteReal if routed.real else o.Permute
    rows, counts, positions = b.add(
        permute, h, routed.e, to="rows counts positions", span=span, num_experts=routed.experts
    )
    weights, activation = _expert_weights(b, subject, moe)
    y = b.one(o.ExpertMlp, rows, counts, *weights, to="y", span=_declared(moe), activation=activation)
    return b.one(o.Combine, y, positions, routed.w, to="mixed", span=span), counts


def _padded(b: Builder, subject: Subject, moe: Moe, h: str, routed: _Routed) -> tuple[str, str]:
    """A fixed number of places for each expert, filled or not (GShard, Lepikhin et al. 2020, section 3.1)."""
    capacity, span, experts = moe.capacity, moe.span("capacity"), routed.experts

    def starts() -> str:
        queues = b.one(o.CountQueues, routed.e, to="queues", span=span, num_experts=experts)
        return b.one(o.QueueStarts, queues, to="starts", span=span, group=moe.group)

    if isinstance(capacity, Factor):
        factor, in_evaluation = capacity.factor, capacity.eval or capacity.factor
        varying = (b.setting(TRAINING),) if factor != in_evaluation else ()
        rows, counts, positions = b.add(
            o.PermutePadded, h, routed.e, starts(), *varying, to="rows counts positions", span=span,
            num_experts=experts, group=moe.group, parts=factor.numerator, whole=factor.denominator,
            eval_parts=in_evaluation.numerator, eval_whole=in_evaluation.denominator, least=capacity.min,
        )  # fmt: skip
    else:
        assert isinstance(capacity, Dynamic)
        chosen = routed.e
        if capacity.max is not None:
            most = capacity.max
            chosen = b.one(
                o.KeepChoices, chosen, starts(), to="kept", span=span,
                group=moe.group, parts=most.numerator, whole=most.denominator,
                eval_parts=most.numerator, eval_whole=most.denominator, least=1,
            )  # fmt: skip
        places = b.one(o.LargestLoad, chosen, to="places", span=span, num_experts=experts)
        rows, counts, positions = b.add(
            o.PermuteDynamic, h, chosen, places, to="rows counts positions", span=span, num_experts=experts
        )
    weights, activation = _expert_weights(b, subject, moe)
    y = b.one(o.ExpertMlpPadded, rows, *weights, to="y", span=_declared(moe), activation=activation)
    return b.one(o.CombinePadded, y, positions, routed.w, to="mixed", span=span), counts


def _declared(moe: Moe) -> Span | None:
    assert isinstance(moe.experts, Experts)
    return moe.experts.span()


def _balance(b: Builder, moe: Moe, routed: _Routed) -> list[str]:
    if not moe.balance:
        return []
    terms = []
    for term in moe.balance:
        if isinstance(term, SwitchLoss):
            choices = b.one(
                o.CountChoices, routed.e, to="choices", span=term.span(), num_experts=routed.experts, group=moe.group,
            )  # fmt: skip
            counted = (routed.p, choices, *routed.real)
            terms.append(b.one(o.SwitchLoss, *counted, to="switch_loss", span=term.span(), group=moe.group))
        else:
            terms.append(b.one(o.ZLoss, routed.logits, *routed.real, to="z_loss", span=term.span()))
    weights = tuple(term.weight for term in moe.balance)
    return [b.one(o.WeightedSum, *terms, to="balance", span=moe.span("balance"), weights=weights)]

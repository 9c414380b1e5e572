"""Lowers the gates of mixtures, one function per gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moec.grammar.spec import Subject
from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Hash, Online, Switch, TopK
from moec.passes.ir import TRAINING, Role
from moec.passes.ir.ops import Jitter, Router
from moec.passes.ir.ops import gate_ops as g
from moec.passes.lower.block_builder import TABLE, Builder, normal

BIAS = "moe.gate.bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """The names of a gate's results.

    `w`, `e`: weights and expert ids of each token's choices, `[batch, sequence, k]`. `logits` and `p` (probabilities),
    `[batch, sequence, experts]`, are for balance terms; a gate may have neither (`gives` in the schema).
    """

    w: str
    e: str
    logits: str | None = None
    p: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The inputs of a gate: the tokens' vectors `h`, the number of experts, and by role the inputs that it `takes`."""

    subject: Subject
    experts: int
    h: str
    beside: Mapping[Role, str]


def lower_gate(b: Builder, subject: Subject, gate: Node, experts: int, h: str, beside: Mapping[Role, str]) -> Gated:
    """Lowers any gate that moec compiles."""
    return _LOWERED[type(gate)](b, gate, Given(subject=subject, experts=experts, h=h, beside=beside))


def _topk(b: Builder, gate: Node, given: Given) -> Gated:
    assert isinstance(gate, TopK)
    subject, span = given.subject, gate.span()
    h = given.h
    if gate.jitter:
        training, line = b.setting(TRAINING), gate.span("jitter") or span
        h = b.one(Jitter, h, given.beside["keys"], training, to="h", span=line, amount=gate.jitter, stream=0)
    weight = b.parameter("moe.gate.weight", (given.experts, subject.dim), subject.dtype, normal(), span, matrices=TABLE)
    logits = b.one(Router, h, weight, to="logits", span=span)
    biased = isinstance(gate.bias, Online)
    beside = {"bias": b.state(BIAS, (given.experts,), gate.span("bias"))} if biased else {}
    p, w, e = b.add(
        g.Route, logits, to="p w e", span=span, beside=beside,
        k=gate.k, score=gate.score, order=gate.order, normalize=gate.normalize,
    )  # fmt: skip
    return Gated(w=w, e=e, logits=logits, p=p)


def _switch(b: Builder, gate: Node, given: Given) -> Gated:
    assert isinstance(gate, Switch)
    spans = {key: span for key in ("", "jitter") if (span := gate.span(key))}
    return _topk(b, TopK(k=1, jitter=gate.jitter).with_spans(spans), given)


def _hash(b: Builder, gate: Node, given: Given) -> Gated:
    assert isinstance(gate, Hash)
    w, e = b.add(
        g.HashRoute, given.beside["tokens"], to="w e", span=gate.span(),
        k=gate.k, num_experts=given.experts, seed=gate.seed,
    )  # fmt: skip
    return Gated(w=w, e=e)


_LOWERED: dict[type[Node], Callable[[Builder, Node, Given], Gated]] = {
    Hash: _hash,
    Switch: _switch,
    TopK: _topk,
}

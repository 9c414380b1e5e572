"""The slots for guests that `adapt` asks for, and the rules that they keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moec.grammar.checking.guest_rules import placed_words
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.source import Span
from moec.grammar.spec import Greedy, Replicate, Shadow, Spec
from moec.passes.degrees.labels import labelled

if TYPE_CHECKING:
    from moec.passes.degrees.degrees import Degrees, ExpertDegrees


def greedy_of(spec: Spec) -> Greedy | None:
    """The word by which experts change homes."""
    return next((word for word in placed_words(spec) if isinstance(word, Greedy)), None)


def guest_words(spec: Spec) -> tuple[Replicate | Shadow, ...]:
    """The words that keep slots for guests."""
    return tuple(word for word in placed_words(spec) if isinstance(word, Replicate | Shadow))


def guest_slots(spec: Spec, ep: int) -> int | None:
    """The slots of a rank for guests: an even part of those of `replicate`, and one for each expert of `shadow`. None
    where experts never leave their homes."""
    if not placed_words(spec):
        return None
    return sum(word.slots // ep if isinstance(word, Replicate) else word.most for word in guest_words(spec))


def require_slots(spec: Spec, degrees: Degrees) -> None:
    """Raises `DiagnosticError` for slots that the ranks of a layer's `ep` cannot have."""
    if words := placed_words(spec):
        problems = [problem for experts in degrees.experts for problem in _problems(spec, experts, words)]
        if problems:
            raise DiagnosticError(problems[:1])


def _problems(
    spec: Spec, experts: ExpertDegrees, words: tuple[Greedy | Replicate | Shadow, ...]
) -> Iterator[Diagnostic]:
    ep, moe = experts.ep, spec.subject.mixtures[experts.layers[0]]
    assert moe is not None
    labels = labelled(spec.parallel.span("ep"), f"ep = {ep}")
    if ep == 1:
        message = "with `ep = 1` every rank has all experts: none has guests, and none moves"
        yield diagnose("MOE0381", words[0].span(), message, labels=labels, help="set `ep`, or leave `adapt` out")
        return
    for word in words:
        if isinstance(word, Replicate) and word.slots % ep:
            nearest = max(ep, round(word.slots / ep) * ep)
            message, span = f"{word.slots} / {ep} is not whole: all ranks have equally many slots", _span(word, "slots")
            yield diagnose("MOE0381", span, message, labels=labels, help=f"set `slots = {nearest}`")
    most, guests = moe.num_experts - moe.num_experts // ep, guest_words(spec)
    if guests and (slots := guest_slots(spec, ep) or 0) > most:
        message = f"{slots} slots of a rank, and with `ep = {ep}` {most} experts are at home on others"
        labels = labels or labelled(moe.span("experts"), f"{moe.num_experts} experts")
        help = f"at most {most} slots of a rank: `replicate({most * ep})`, or `shadow({most})`"
        name = "slots" if isinstance(guests[0], Replicate) else "most"
        yield diagnose("MOE0381", _span(guests[0], name), message, labels=labels, help=help)


def _span(word: Replicate | Shadow, name: str) -> Span | None:
    return word.span(name) or word.span()

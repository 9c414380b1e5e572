"""The experts whose hidden width `etp` cuts, and those that it leaves whole."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.spec import Activated, Moe, Spec
from moec.grammar.spec.base import Node
from moec.passes.degrees.stated_degrees import PlacedMixture


def sliced_experts(spec: Spec, moe: Moe) -> Iterator[Activated]:
    """The bodies of experts that `etp` cuts along their hidden width; of a mixture of mixtures, the inner ones.

    Ranks that do not slice an expert have different rows of it, as those of `edp` have: slots of `soft`, sequences of
    `smear`, and rows of the kinds without an activation.
    """
    if moe.gate.slices_experts:
        yield from (body for body in _bodies(spec, moe) if isinstance(body, Activated))


def whole_experts(spec: Spec, mixtures: list[PlacedMixture]) -> dict[str, list[int]]:
    """The layers with an `etp` above 1 that does not cut all of their experts, by the word of the kind or the gate."""
    layers: dict[str, list[int]] = {}
    for moe, _, etp, numbers in mixtures:
        if etp is None or etp.value == 1:
            continue
        if moe.gate.slices_experts:
            words = {body.word for body in _bodies(spec, moe) if not isinstance(body, Activated)}
        else:
            words = {moe.gate.word}
        for word in sorted(words):
            layers.setdefault(word, []).extend(numbers)
    return {word: sorted(numbers) for word, numbers in layers.items()}


def _bodies(spec: Spec, moe: Moe) -> Iterator[Node]:
    for part in moe.parts:
        inner = spec.subject.within(part)
        yield from (each.body for each in (inner.parts if inner is not None else (part,)))

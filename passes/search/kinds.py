"""Kinds of mixtures: a search chooses `ep` and `etp` for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import Moe, Spec
from moec.grammar.spec.parallel import ParallelLayers
from moec.grammar.stated import blocks_without, is_open, open_words, stated_by_layer
from moec.passes.degrees.expert_slices import sliced_experts

Pair = tuple[int, int]
"""`ep` and `etp`."""

EXPERT_WORDS = ("ep", "etp")


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that have one `ep` and `etp`: equal mixtures for which the file states the same.

    `ep`, `etp`: what it states, None for nothing. `counts`, `widths`: the numbers of experts that `ep` divides, and the
    widths that `etp` divides.
    """

    layers: tuple[int, ...]
    ep: Any
    etp: Any
    counts: frozenset[int]
    widths: frozenset[int]


def kinds_of(spec: Spec) -> tuple[Kind, ...]:
    """The kinds of a model, in the order of their first layers. Without a mixture it is one of no layer.

    Layers for which nothing is open, or whose `ep` follows from all of them, are of one kind if the file states the
    same for them.
    """
    ep_of, etp_of = stated_by_layer(spec, "ep"), stated_by_layer(spec, "etp")
    layers = dict[tuple[object, ...], list[int]]()
    for number, moe in enumerate(spec.subject.mixtures):
        if moe is not None:
            stated = [of[number].value if number in of else None for of in (ep_of, etp_of)]
            is_chosen = stated[0] is not None and any(map(is_open, stated))
            layers.setdefault((*stated, moe if is_chosen else None), []).append(number)
    if not layers:
        return (Kind((), spec.parallel.ep, spec.parallel.etp, frozenset(), frozenset()),)
    return tuple(_kind(spec, numbers, ep, etp) for (ep, etp, _), numbers in layers.items())


def _kind(spec: Spec, layers: Sequence[int], ep: object, etp: object) -> Kind:
    every = (spec.subject.mixtures[number] for number in layers)
    mixtures: dict[int, Moe] = {id(moe): moe for moe in every if moe is not None}
    widths = {body.hidden for moe in mixtures.values() for body in sliced_experts(spec, moe)}
    counts = {count for moe in mixtures.values() for count in moe.counts}
    return Kind(tuple(layers), ep, etp, frozenset(counts), frozenset(widths))


def words_of_pairs(spec: Spec, kinds: Sequence[Kind], pairs: Sequence[Pair]) -> Mapping[str, Any]:
    """The words of `parallel` with which each kind has its pair: those of most layers, and blocks for the others."""
    own = [(kind.layers, dict(zip(EXPERT_WORDS, pair, strict=True))) for kind, pair in zip(kinds, pairs, strict=True)]
    words: dict[str, Any] = {word: _of_most([(layers, of[word]) for layers, of in own]) for word in EXPERT_WORDS}
    searched = [word for word in EXPERT_WORDS if word in open_words(spec)]
    others = dict[tuple[tuple[str, Any], ...], list[int]]()
    for layers, of in own:
        if differing := tuple((word, of[word]) for word in searched if of[word] != words[word]):
            others.setdefault(differing, []).extend(layers)
    blocks = (ParallelLayers(layers=tuple(sorted(layers)), **dict(of)) for of, layers in others.items())
    return {**words, "layers": (*blocks_without(spec.parallel.layers, searched), *blocks)}


def _of_most(values: Sequence[tuple[Sequence[int], int]]) -> int:
    """The value of most layers; of equally many the first."""
    number = Counter[int]()
    for layers, value in values:
        number[value] += len(layers)
    return number.most_common(1)[0][0]


def in_short(words: Mapping[str, Any]) -> dict[str, Any]:
    """Words of `parallel` as they are shown, each with those of blocks of layers: `64 (8 in layers 0..3)`."""
    blocks: Sequence[ParallelLayers] = words.get("layers", ())
    found = dict[str, Any]()
    for word, value in words.items():
        if value is not None and word != "layers":
            own = [(getattr(block, word), block.layers) for block in blocks if getattr(block, word, None) is not None]
            others = ", ".join(f"{of_block} in {numbered(layers)}" for of_block, layers in own)
            found[word] = f"{value} ({others})" if others else value
    return found

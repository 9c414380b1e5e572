"""Kinds of mixtures: a search chooses `ep` and `etp` for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import Moe, Spec
from moec.grammar.spec.parallel import ParallelLayers
from moec.grammar.stated import blocks_without, is_open, stated_by_layer
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
    """The words of `parallel` with which each kind has its pair, where the file leaves it open: a word has the value of
    most of its layers, blocks those of the others. What the file states stays."""
    words, others = dict[str, Any](), dict[tuple[int, ...], dict[str, int]]()
    for place, word in enumerate(EXPERT_WORDS):
        stated = getattr(spec.parallel, word)
        values = [(kind, pair[place]) for kind, pair in zip(kinds, pairs, strict=True) if is_open(getattr(kind, word))]
        if is_open(stated):
            words[word] = _of_most([pair for pair in values if getattr(pair[0], word) == stated])
        else:
            words[word] = stated
        for kind, value in values:
            if value != words[word] or any(_states(block, word, kind.layers[:1]) for block in spec.parallel.layers):
                others.setdefault(kind.layers, {})[word] = value
    blocks = [_without_open(block) for block in spec.parallel.layers]
    blocks += [ParallelLayers(layers=layers).replace(**of) for layers, of in others.items()]
    return {**words, "layers": blocks_without(blocks, ())}


def _states(block: ParallelLayers, word: str, layers: Sequence[int]) -> bool:
    """Whether a block states a value of a word for one of these layers."""
    value = getattr(block, word)
    return value is not None and not is_open(value) and not {*layers}.isdisjoint(block.layers or layers)


def _without_open(block: ParallelLayers) -> ParallelLayers:
    return block.replace(**{word: None for word in EXPERT_WORDS if is_open(getattr(block, word))})


def _of_most(values: Sequence[tuple[Kind, int]]) -> int:
    """The value of most layers; of equally many the first; 1 for none."""
    number = Counter[int]()
    for kind, value in values:
        number[value] += len(kind.layers)
    return number.most_common(1)[0][0] if number else 1


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

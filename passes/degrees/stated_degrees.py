"""The degrees that a Spec states, and their layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from moec.grammar.source import Span
from moec.grammar.spec import Moe, Parallel, Spec

if TYPE_CHECKING:  # `moec check` imports no op of the IR
    from moec.passes.ir import Recompute


WORDS = ("dp", "tp", "ep", "zero", "recompute", "microbatches", "sequence_parallel")
"""The words of `parallel` that are degrees."""


class Stated(NamedTuple):
    """An `ep` that the file states, and its span."""

    ep: int
    span: Span | None


def number_of(degree: object) -> int | None:
    """A degree that the file states, or None; lists and `auto` were rejected earlier."""
    assert degree is None or isinstance(degree, int)
    return degree


def zero_of(spec: Spec) -> int:
    """The stage of ZeRO that the file states, 0 to 3; `auto` was rejected earlier."""
    assert isinstance(spec.parallel.zero, int)
    return spec.parallel.zero


def data_parallel_size(spec: Spec) -> int:
    """Number of data-parallel ranks that divide the batch: `dp`, stated or default, if the degrees are valid."""
    return number_of(spec.parallel.dp) or max(1, spec.cluster.ranks // (number_of(spec.parallel.tp) or 1))


def stated_eps(spec: Spec) -> list[tuple[Iterable[int], Stated]]:
    """Every stated `ep` with its layers; for a layer with several, the last one counts."""
    all_layers, parallel = range(spec.subject.depth), spec.parallel
    blocks: list[tuple[Iterable[int], object, Span | None]] = [(all_layers, parallel.ep, parallel.span("ep"))]
    blocks += [(block.layers or all_layers, block.ep, block.span("ep")) for block in parallel.layers]
    return [(layers, Stated(ep, span)) for layers, degree, span in blocks if (ep := number_of(degree)) is not None]


def stated_names(spec: Spec) -> frozenset[str]:
    """The words of `parallel` that the file has; `layers.ep` and `recompute.3` are those of a block of `layers`."""
    parallel, defaults, all_layers = spec.parallel, Parallel(), range(spec.subject.depth)
    names = {name for name in WORDS if parallel.given(name) or getattr(parallel, name) != getattr(defaults, name)}
    names |= {"layers.ep" for block in parallel.layers if block.ep is not None}
    blocks = [block for block in parallel.layers if block.recompute is not None]
    return frozenset(names | {f"recompute.{number}" for block in blocks for number in block.layers or all_layers})


def microbatches_of(spec: Spec) -> int:
    """The number of micro-batches of a step; 1 by default."""
    return number_of(spec.parallel.microbatches) or 1


def recomputed_of(spec: Spec) -> list[Recompute]:
    """The part of each layer that backward computes again; for a layer with several words, the last one counts.

    `experts` concerns the layers with a mixture; the others recompute nothing.
    """
    mixtures, parallel = spec.subject.mixtures, spec.parallel
    words: list[Recompute] = ["none"] * len(mixtures)
    all_layers = range(len(mixtures))
    blocks = [(block.layers or all_layers, block.recompute) for block in parallel.layers]
    for layers, word in ((all_layers, parallel.recompute), *blocks):
        assert word != "auto", "rejected earlier"
        if word is None:
            continue
        for number in layers:
            words[number] = "none" if word == "experts" and mixtures[number] is None else word
    return words


Mixtures = list[tuple[Moe, Stated | None, list[int]]]
"""Triples of a mixture, its stated `ep`, and the layers with both."""


def mixtures_of(spec: Spec) -> Mixtures:
    """Each distinct mixture with each `ep` stated for it, in the order of the layers."""
    mixtures = spec.subject.mixtures
    stated: list[Stated | None] = [None] * len(mixtures)
    for layers, ep in stated_eps(spec):
        for number in layers:
            stated[number] = ep
    layers_of: dict[tuple[int, int], tuple[Moe, Stated | None, list[int]]] = {}
    for number, moe in enumerate(mixtures):
        if moe is not None:
            ep_of_layer = stated[number]
            layers_of.setdefault((id(moe), id(ep_of_layer)), (moe, ep_of_layer, []))[2].append(number)
    return list(layers_of.values())


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})

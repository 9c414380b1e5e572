"""The degrees that a Spec states, and their layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from moec.grammar.source import Span
from moec.grammar.spec import Moe, Parallel, Spec

if TYPE_CHECKING:  # `moec check` imports no op of the IR
    from moec.passes.ir import Recompute


WORDS = ("dp", "tp", "cp", "ep", "etp", "zero", "recompute", "microbatches", "sequence_parallel")
"""The words of `parallel` that are degrees."""


class Stated(NamedTuple):
    """An `ep` or `etp` that the file states, and its span."""

    degree: int
    span: Span | None


class Sharers(NamedTuple):
    """The degrees whose ranks share each sequence."""

    cp: int
    tp: int

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.cp * self.tp


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
    return number_of(spec.parallel.dp) or max(1, spec.cluster.ranks // sharers_of(spec))


def stated_sharers(spec: Spec) -> Sharers:
    """`cp` and `tp`, stated or 1."""
    return Sharers(number_of(spec.parallel.cp) or 1, number_of(spec.parallel.tp) or 1)


def sharers_of(spec: Spec) -> int:
    """Number of ranks that share a sequence: `cp` * `tp`."""
    return stated_sharers(spec).ranks


def stated_of_layers(spec: Spec, word: Literal["ep", "etp"]) -> list[tuple[Iterable[int], Stated]]:
    """Every stated `ep` or `etp` with its layers; for a layer with several, the last one counts."""
    all_layers, parallel = range(spec.subject.depth), spec.parallel
    blocks = [(all_layers, parallel), *((block.layers or all_layers, block) for block in parallel.layers)]
    return [
        (layers, Stated(degree, block.span(word)))
        for layers, block in blocks
        if (degree := number_of(getattr(block, word))) is not None
    ]


def stated_names(spec: Spec) -> frozenset[str]:
    """The words of `parallel` that the file has; `layers.ep` and `recompute.3` are those of a block of `layers`."""
    parallel, defaults, all_layers = spec.parallel, Parallel(), range(spec.subject.depth)
    names = {name for name in WORDS if parallel.given(name) or getattr(parallel, name) != getattr(defaults, name)}
    names |= {
        f"layers.{word}" for block in parallel.layers for word in ("ep", "etp") if getattr(block, word) is not None
    }
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


class PlacedMixture(NamedTuple):
    """A mixture, the `ep` and the `etp` that the file states for it, and the layers with all three."""

    moe: Moe
    ep: Stated | None
    etp: Stated | None
    layers: list[int]


def mixtures_of(spec: Spec) -> list[PlacedMixture]:
    """Each distinct mixture with each `ep` and `etp` stated for it, in the order of the layers."""
    ep_of, etp_of = _by_layer(spec, "ep"), _by_layer(spec, "etp")
    placed: dict[tuple[int, int, int], PlacedMixture] = {}
    for number, moe in enumerate(spec.subject.mixtures):
        if moe is not None:
            ep, etp = ep_of.get(number), etp_of.get(number)
            placed.setdefault((id(moe), id(ep), id(etp)), PlacedMixture(moe, ep, etp, [])).layers.append(number)
    return list(placed.values())


def _by_layer(spec: Spec, word: Literal["ep", "etp"]) -> dict[int, Stated]:
    return {number: stated for layers, stated in stated_of_layers(spec, word) for number in layers}


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})

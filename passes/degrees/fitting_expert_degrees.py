"""Which `ep` and `etp` fit the ranks, each other, the experts and their widths: the advice of diagnostics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from moec.grammar.spec import Spec, Topology
from moec.passes.degrees.expert_slices import sliced_experts
from moec.passes.degrees.fitting_degrees import Changes, ratio
from moec.passes.degrees.near_rules import near_experts
from moec.passes.degrees.stated_degrees import PlacedMixture, Stated, divisors, stated_sharers

Word = Literal["ep", "etp"]


class FittingExpertDegrees(NamedTuple):
    """For each stated `ep` and `etp` of layers with a mixture the nearest value that fits: its own where it does.

    An `etp` that divides ranks and widths stays. If its product with an `ep` does not divide the ranks, `ep` changes.
    """

    ep: Mapping[Stated, int]
    etp: Mapping[Stated, int]

    @classmethod
    def of(cls, spec: Spec, mixtures: list[PlacedMixture], changes: Changes) -> FittingExpertDegrees:
        """`changes` are those of `tp` and `cp`, by which gates `topology` find experts near."""
        ranks, stated = spec.cluster.ranks, stated_sharers(spec)
        sharers = changes.get("cp", stated.cp) * changes.get("tp", stated.tp)
        etps, eps = dict[Stated, int](), dict[Stated, int]()
        for etp, sliced in _by_degree(mixtures, "etp").items():
            common = math.gcd(ranks, *_sizes(spec, sliced, "etp"))
            beside = [m.ep.degree for m in sliced if m.ep is not None and fits_alone(spec, mixtures, "ep", m.ep)]
            fitting = [d for d in divisors(common) if all(ranks % (ep * d) == 0 for ep in beside)]
            etps[etp] = _nearest(etp, fitting) if common % etp.degree else etp.degree
        for ep, placed in _by_degree(mixtures, "ep").items():
            slices = [(m, etps[m.etp] if m.etp is not None else 1) for m in placed]
            common = math.gcd(*(ranks // etp for _, etp in slices), *_sizes(spec, placed, "ep"))
            near = [
                d for d in divisors(common) if all(_has_near_experts(spec, m, sharers, d, etp) for m, etp in slices)
            ]
            eps[ep] = _nearest(ep, near or divisors(common)) if common % ep.degree else ep.degree
        return cls(eps, etps)


def fits_alone(spec: Spec, mixtures: list[PlacedMixture], word: Word, stated: Stated) -> bool:
    """Whether a degree divides the ranks, and the experts or their widths, whatever the other degree of its layers."""
    sizes = _sizes(spec, _by_degree(mixtures, word).get(stated, ()), word)
    return all(size % stated.degree == 0 for size in (spec.cluster.ranks, *sizes))


def nearest_divisor(number: int, stated: Stated) -> int:
    """The divisor of `number` that is nearest to a stated degree."""
    return _nearest(stated, divisors(number))


def _by_degree(mixtures: list[PlacedMixture], word: Word) -> dict[Stated, list[PlacedMixture]]:
    placed: dict[Stated, list[PlacedMixture]] = {}
    for mixture in mixtures:
        if (stated := getattr(mixture, word)) is not None:
            placed.setdefault(stated, []).append(mixture)
    return placed


def _sizes(spec: Spec, mixtures: Iterable[PlacedMixture], word: Word) -> Iterator[int]:
    """The sizes that a degree divides: the numbers of experts of each kind, or the hidden widths of those it cuts."""
    for mixture in mixtures:
        if word == "ep":
            yield from mixture.moe.counts
        else:
            yield from (body.hidden for body in sliced_experts(spec, mixture.moe))


def _has_near_experts(spec: Spec, mixture: PlacedMixture, sharers: int, ep: int, etp: int) -> bool:
    """Whether a token finds k experts in its own node, if its gate asks for them there (`near_rules`)."""
    gate = mixture.moe.gate
    if not isinstance(gate, Topology) or gate.share is None:
        return True
    return near_experts(spec, mixture.moe, sharers, ep, etp) >= gate.k


def _nearest(stated: Stated, fitting: list[int]) -> int:
    return min(fitting, key=lambda degree: (ratio(degree, stated.degree), degree))

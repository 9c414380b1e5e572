"""Which `ep` and `etp` fit the ranks, each other, the experts and their widths: the advice of diagnostics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from moec.grammar.spec import Spec, Topology
from moec.grammar.stated import Stated, sharing_degrees, stage_ranks
from moec.passes.degrees.expert_slices import sliced_experts
from moec.passes.degrees.fitting_degrees import Changes, ratio
from moec.passes.degrees.near_rules import num_near_experts
from moec.passes.degrees.stated_degrees import PlacedMixture, divisors

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
        sharers = sharing_degrees(spec)._replace(**{w: changes[w] for w in ("cp", "tp") if w in changes}).sharers
        etps = {etp: _fitting_etp(spec, mixtures, etp, sliced) for etp, sliced in _by_degree(mixtures, "etp").items()}
        eps = dict[Stated, int]()
        for ep, placed in _by_degree(mixtures, "ep").items():
            with_etp = [(mixture, etps[mixture.etp] if mixture.etp is not None else 1) for mixture in placed]
            eps[ep] = _fitting_ep(spec, ep, with_etp, sharers)
        return cls(eps, etps)


def _fitting_etp(spec: Spec, mixtures: list[PlacedMixture], etp: Stated, sliced: list[PlacedMixture]) -> int:
    """`etp` itself, or the nearest divisor of the ranks and of the widths of the `sliced` mixtures.

    The product of that divisor with each `ep` of these mixtures divides the ranks, if the `ep` fits by itself.
    """
    ranks, degree = stage_ranks(spec), int(etp.value)
    common = math.gcd(ranks, *_sizes(spec, sliced, "etp"))
    if common % degree == 0:
        return degree
    eps = [m.ep.value for m in sliced if m.ep is not None and fits_alone(spec, mixtures, "ep", m.ep)]
    return _nearest(etp, [d for d in divisors(common) if all(ranks % (ep * d) == 0 for ep in eps)])


def _fitting_ep(spec: Spec, ep: Stated, placed: list[tuple[PlacedMixture, int]], sharers: int) -> int:
    """`ep` itself, or the nearest divisor of ranks / `etp` and of the experts, of mixtures with their fitting `etp`.

    If some of these divisors leave enough experts near, it is one of them.
    """
    ranks, degree = stage_ranks(spec), int(ep.value)
    common = math.gcd(*(ranks // etp for _, etp in placed), *_sizes(spec, (mixture for mixture, _ in placed), "ep"))
    if common % degree == 0:
        return degree
    near = [d for d in divisors(common) if all(_has_near_experts(spec, m, sharers, d, etp) for m, etp in placed)]
    return _nearest(ep, near or divisors(common))


def fits_alone(spec: Spec, mixtures: list[PlacedMixture], word: Word, stated: Stated) -> bool:
    """Whether a degree divides the ranks, and the experts or their widths, whatever the other degree of its layers."""
    sizes = _sizes(spec, _by_degree(mixtures, word).get(stated, ()), word)
    return all(size % stated.value == 0 for size in (stage_ranks(spec), *sizes))


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
    return num_near_experts(spec, mixture.moe, sharers, ep, etp) >= gate.k


def _nearest(stated: Stated, fitting: list[int]) -> int:
    return min(fitting, key=lambda degree: (ratio(degree, stated.value), degree))

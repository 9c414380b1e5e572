"""Chooses the degrees of a Spec, stated or default, and checks them. `moec check` runs nothing else of passes."""

from __future__ import annotations

from typing import NamedTuple

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.passes.place.degree_rules import problems_of
from moec.passes.place.near_rules import near_problems
from moec.passes.place.stated_degrees import Mixtures, divisors, mixtures_of, number_of


class ExpertDegrees(NamedTuple):
    """The expert degrees of some layers: one factorisation of the ranks, and so one mesh.

    `stated` says whether the file gives this `ep` for all of these layers; `edp` is ranks / `ep`.
    """

    layers: tuple[int, ...]
    ep: int
    edp: int
    stated: bool


class Degrees(NamedTuple):
    """The degree of every axis, and whether the file states it. `experts` is in the order of the layers."""

    ranks: int
    dp: int
    dp_stated: bool
    tp: int
    tp_stated: bool
    experts: tuple[ExpertDegrees, ...]


def choose_degrees(spec: Spec) -> Degrees:
    """The degrees of `spec`, stated or default. Raises `DiagnosticError`."""
    ranks, parallel = spec.cluster.ranks, spec.parallel
    mixtures = mixtures_of(spec)
    if problems := problems_of(spec, mixtures):
        raise DiagnosticError(problems)
    tp = number_of(parallel.tp) or 1
    experts = _experts(ranks, mixtures)
    if problems := near_problems(spec, tp, {layer: of.ep for of in experts for layer in of.layers}):
        raise DiagnosticError(problems)
    return Degrees(
        ranks=ranks,
        dp=number_of(parallel.dp) or ranks // tp,
        dp_stated=parallel.dp is not None,
        tp=tp,
        tp_stated=parallel.tp is not None,
        experts=experts,
    )


def _experts(ranks: int, mixtures: Mixtures) -> tuple[ExpertDegrees, ...]:
    """One factorisation per distinct `ep`. Layers without a stated `ep` get the largest that fits all of them."""
    default = _largest_ep(ranks, [count for moe, stated, _ in mixtures if stated is None for count in moe.counts])
    layers: dict[int, list[int]] = {}
    by_default: set[int] = set()
    for _, stated, numbers in mixtures:
        ep = stated.ep if stated else default
        layers.setdefault(ep, []).extend(numbers)
        by_default |= set() if stated else {ep}
    degrees = (
        ExpertDegrees(layers=tuple(sorted(numbers)), ep=ep, edp=ranks // ep, stated=ep not in by_default)
        for ep, numbers in layers.items()
    )
    return tuple(sorted(degrees, key=lambda degree: degree.layers[0]))


def _largest_ep(ranks: int, expert_counts: list[int]) -> int:
    if not expert_counts:
        return 1
    return max(d for d in divisors(ranks) if all(count % d == 0 for count in expert_counts))

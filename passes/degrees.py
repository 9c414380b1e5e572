"""The degrees of a Spec, stated or by default, and the rules that they keep. `moec check` needs no more of passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Label, diagnose
from moec.grammar.rules import numbered
from moec.grammar.source import Span
from moec.grammar.spec import Moe, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDegrees:
    """How the experts of some layers are spread: one factorisation of the ranks, and so one mesh.

    `stated` says whether the file gives this `ep` for all of them; `edp` follows from it.
    """

    layers: tuple[int, ...]
    ep: int
    edp: int
    stated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The degree of every axis, and whether the file stated it. `experts` is in the order of the layers."""

    ranks: int
    dp: int
    dp_stated: bool
    experts: tuple[ExpertDegrees, ...]


@dataclass(frozen=True, slots=True)
class _Stated:
    """An `ep` that the file gives, and where."""

    ep: int
    span: Span | None


def choose_degrees(spec: Spec) -> Degrees:
    """The degrees of `spec`, stated or default. Raises `DiagnosticError`."""
    ranks = spec.cluster.ranks
    mixtures = _mixtures(spec)
    dp = spec.parallel.dp
    problems = [*_mesh_problems(spec), *_expert_problems(spec, mixtures), *_batch_problems(spec)]
    if problems:
        raise DiagnosticError(problems)
    return Degrees(ranks=ranks, dp=_number(dp) or ranks, dp_stated=dp is not None, experts=_experts(ranks, mixtures))


def _number(degree: object) -> int | None:
    """A degree that the file gives, or None; lists and `auto` were refused before."""
    assert degree is None or isinstance(degree, int)
    return degree


def _stated_eps(spec: Spec) -> list[tuple[Iterable[int], _Stated]]:
    """Every `ep` of the file with the layers that it is said of, in an order in which the last one counts."""
    every, parallel = range(spec.model.depth), spec.parallel
    given: list[tuple[Iterable[int], object, Span | None]] = [(every, parallel.ep, parallel.span("ep"))]
    given += [(block.layers or every, block.ep, block.span("ep")) for block in parallel.layers]
    return [(layers, _Stated(ep, span)) for layers, degree, span in given if (ep := _number(degree)) is not None]


_Mixtures = list[tuple[Moe, _Stated | None, list[int]]]
"""A mixture, the `ep` that the file gives it, and the layers that are so."""


def _mixtures(spec: Spec) -> _Mixtures:
    """Each distinct mixture with each `ep` that it is given, in the order of the layers."""
    stated: list[_Stated | None] = [None] * spec.model.depth
    for layers, given in _stated_eps(spec):
        for number in layers:
            stated[number] = given
    found: dict[tuple[int, int], tuple[Moe, _Stated | None, list[int]]] = {}
    for number, layer in enumerate(spec.model.layers):
        if layer.moe is not None:
            given_here = stated[number]
            key = (id(layer.moe), id(given_here))
            found.setdefault(key, (layer.moe, given_here, []))[2].append(number)
    return list(found.values())


def _experts(ranks: int, mixtures: _Mixtures) -> tuple[ExpertDegrees, ...]:
    """One factorisation per distinct `ep`. Layers without a stated one share the largest that fits them all."""
    default = _largest_ep(ranks, [moe.num_experts for moe, stated, _ in mixtures if stated is None])
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
    return max(d for d in _divisors(ranks) if all(count % d == 0 for count in expert_counts))


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _cluster_label(spec: Spec) -> tuple[Label, ...]:
    span, ranks = spec.cluster.span(), spec.cluster.ranks
    return (Label(span=span, message=f"{ranks} {'rank' if ranks == 1 else 'ranks'}"),) if span else ()


def _mesh_problems(spec: Spec) -> list[Diagnostic]:
    ranks, dp = spec.cluster.ranks, _number(spec.parallel.dp)
    problems = []
    if dp is not None and dp != ranks:
        problems.append(
            diagnose(
                "MOE0310",
                spec.parallel.span("dp"),
                f"dp = {dp}, and every other dense degree is 1, but the cluster has {ranks} ranks",
                labels=_cluster_label(spec),
                help=f"set `dp = {ranks}`, or leave `dp` out",
            )
        )
    for _, stated in _stated_eps(spec):
        if ranks % stated.ep:
            below = max(d for d in _divisors(ranks) if d <= stated.ep)
            problems.append(
                diagnose(
                    "MOE0312",
                    stated.span,
                    f"{ranks} / {stated.ep} is not whole",
                    labels=_cluster_label(spec),
                    help=f"set `ep = {below}`",
                )
            )
    return problems


def _expert_problems(spec: Spec, mixtures: _Mixtures) -> list[Diagnostic]:
    problems = []
    for moe, stated, layers in mixtures:
        count = moe.num_experts
        if stated is None or count % stated.ep == 0:
            continue
        ep = stated.ep
        ways = [f"`ep = {d}` ({count // d} per rank)" for d in _divisors(spec.cluster.ranks) if count % d == 0][-1:]
        more = -(-count // ep) * ep
        ways.append(f"`experts = {more} * …` ({more // ep} per rank)")
        declared = moe.span("experts")
        where = f"{count} experts declared here ({numbered(layers)})"
        problems.append(
            diagnose(
                "MOE0311",
                stated.span,
                f"{count} / {ep} leaves {count % ep} experts over",
                labels=(Label(span=declared, message=where),) if declared else (),
                help=f"set {' or '.join(ways)}",
            )
        )
    return problems


def _batch_problems(spec: Spec) -> list[Diagnostic]:
    train, ranks = spec.train, spec.cluster.ranks
    if train is None or train.batch % ranks == 0:
        return []
    more = -(-train.batch // ranks) * ranks
    return [
        diagnose(
            "MOE0313",
            train.span("batch"),
            f"{train.batch} sequences over {ranks} ranks",
            labels=_cluster_label(spec),
            help=f"set `batch = {more}`",
        )
    ]

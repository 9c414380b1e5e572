"""The degrees of a Spec, stated or by default, and the rules that they keep. `moec check` needs no more of passes."""

from __future__ import annotations

from dataclasses import dataclass

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Label, diagnose
from moec.grammar.rules import numbered
from moec.grammar.spec import Moe, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The degree of every axis, and which of them the file stated."""

    ranks: int
    dp: int
    ep: int
    edp: int
    stated: frozenset[str]


def choose_degrees(spec: Spec) -> Degrees:
    """The degrees of `spec`, stated or default. Raises `DiagnosticError`."""
    ranks = spec.cluster.ranks
    moes = _layers_of_moes(spec)
    dp, ep = _stated(spec, "dp"), _stated(spec, "ep")
    stated = frozenset(name for name, value in (("dp", dp), ("ep", ep)) if value is not None)
    ep = ep or _largest_ep(ranks, [moe.num_experts for moe, _ in moes])
    problems = [*_mesh_problems(spec), *_expert_problems(spec, moes), *_batch_problems(spec)]
    if problems:
        raise DiagnosticError(problems)
    return Degrees(ranks=ranks, dp=dp or ranks, ep=ep, edp=ranks // ep, stated=stated)


def _stated(spec: Spec, axis: str) -> int | None:
    """The degree that the file gives; lists and `auto` were refused before."""
    value = getattr(spec.parallel, axis)
    assert value is None or isinstance(value, int)
    return value


def _layers_of_moes(spec: Spec) -> list[tuple[Moe, list[int]]]:
    """Each distinct mixture, and the layers that have it."""
    found: dict[int, tuple[Moe, list[int]]] = {}
    for number, layer in enumerate(spec.model.layers):
        if layer.moe is not None:
            found.setdefault(id(layer.moe), (layer.moe, []))[1].append(number)
    return list(found.values())


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
    ranks, dp, ep = spec.cluster.ranks, _stated(spec, "dp"), _stated(spec, "ep")
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
    if ep is not None and ranks % ep:
        below = max(d for d in _divisors(ranks) if d <= ep)
        problems.append(
            diagnose(
                "MOE0312",
                spec.parallel.span("ep"),
                f"{ranks} / {ep} is not whole",
                labels=_cluster_label(spec),
                help=f"set `ep = {below}`",
            )
        )
    return problems


def _expert_problems(spec: Spec, moes: list[tuple[Moe, list[int]]]) -> list[Diagnostic]:
    ep = _stated(spec, "ep")
    if ep is None:
        return []
    problems = []
    for moe, layers in moes:
        count = moe.num_experts
        if count % ep == 0:
            continue
        ways = [f"`ep = {d}` ({count // d} per rank)" for d in _divisors(spec.cluster.ranks) if count % d == 0][-1:]
        more = -(-count // ep) * ep
        ways.append(f"`experts = {more} * …` ({more // ep} per rank)")
        declared = moe.span("experts")
        where = f"{count} experts declared here ({numbered(layers)})"
        problems.append(
            diagnose(
                "MOE0311",
                spec.parallel.span("ep"),
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

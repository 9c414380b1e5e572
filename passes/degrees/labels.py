"""Labels and messages that the rules of degrees share."""

from __future__ import annotations

from moec.grammar.checking.rank_rules import states_cluster
from moec.grammar.diagnostics import Diagnostic, Label, diagnose
from moec.grammar.source import Span
from moec.grammar.spec import Spec
from moec.grammar.stated import pipeline_of


def labelled(span: Span | None, message: str) -> tuple[Label, ...]:
    """A label, if the Spec has the place."""
    return (Label(span=span, message=message),) if span else ()


def cluster_label(spec: Spec) -> tuple[Label, ...]:
    """A label with the number of ranks, at the cluster, and one at a `pp` above 1, which divides them."""
    ranks, pp = spec.cluster.ranks, pipeline_of(spec).pp
    labels = labelled(spec.cluster.span(), f"{ranks} {'rank' if ranks == 1 else 'ranks'}")
    return labels + (labelled(spec.parallel.span("pp"), f"pp = {pp}") if pp > 1 else ())


def quotient(size: int, degree: int, beside: int = 1) -> str:
    """`8 / 3`, or `8 / (2 * 3)` where a degree is multiplied by another one."""
    return f"{size} / {degree}" if beside == 1 else f"{size} / ({degree} * {beside})"


def not_whole(
    spec: Spec, span: Span | None, degree: int, help: str, beside: int = 1, labels: tuple[Label, ...] = ()
) -> Diagnostic:
    """MOE0312 for a degree at `span` which, times `pp` and one `beside` it at `labels`, does not divide the ranks."""
    beside *= pipeline_of(spec).pp
    message = f"{quotient(spec.cluster.ranks, degree, beside)} is not whole"
    if not states_cluster(spec):
        size = -(-8 // (degree * beside)) * degree * beside  # the smallest multiple from 8 on
        help = (
            "without a `cluster` there is one rank: declare yours, "
            f'`cluster "mine" {{ device = h100; level "node" {{ size = {size} }} }}`, or leave the degree out'
        )
    return diagnose("MOE0312", span, message, labels=cluster_label(spec) + labels, help=help)

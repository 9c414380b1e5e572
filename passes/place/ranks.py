"""Changes a Spec to another number of ranks than its cluster has."""

from __future__ import annotations

from moec.grammar.spec import Cluster, Level, Spec


def for_ranks(spec: Spec, ranks: int) -> Spec:
    """`spec` over `ranks` of its devices, on one level; unchanged where its cluster has `ranks` ranks.

    The new cluster has no span, so diagnostics do not point at the old one.
    """
    if spec.cluster.ranks == ranks:
        return spec
    level = Level(name="rank", size=ranks)
    return spec.replace(cluster=Cluster(name=f"{ranks}_ranks", device=spec.cluster.device, levels=(level,)))

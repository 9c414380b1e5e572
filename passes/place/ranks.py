"""Changes a Spec to another number of ranks than its cluster has."""

from __future__ import annotations

from moec.grammar.spec import Cluster, Level, Spec


def for_ranks(spec: Spec, ranks: int) -> Spec:
    """`spec` over `ranks` of its devices; unchanged where its cluster has `ranks` ranks.

    Levels are filled from the innermost out, and the outermost joins as many as there are. Where `ranks` fill or divide
    no level, there is one level, with the network of the outermost. The new cluster has no span, so diagnostics do not
    point at the old one.
    """
    if spec.cluster.ranks == ranks:
        return spec
    levels = _levels(spec.cluster.levels, ranks)
    return spec.replace(cluster=Cluster(name=f"{ranks}_ranks", device=spec.cluster.device, levels=levels))


def _levels(levels: tuple[Level, ...], ranks: int) -> tuple[Level, ...]:
    if not levels:
        return (Level(name="rank", size=ranks),)
    *inside, outermost = levels
    left, used = ranks, list[Level]()
    for level in inside:
        size = level.size if left % level.size == 0 else left
        if level.size % size:
            return (outermost.replace(size=ranks),)
        used.append(level.replace(size=size))
        left //= size
    return (*used, outermost.replace(size=left))

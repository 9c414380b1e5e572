"""How the ranks of a group lie on the levels of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from moec.grammar.spec.cluster import Cluster, Level
from moec.passes.ir.mesh import EXPERT_AXES
from moec.passes.ir.op import Meshes
from moec.passes.ir.work.arrays import larger, smaller


class Group(NamedTuple):
    """Ranks that exchange bytes, and the distance between neighbours of them."""

    ranks: int
    stride: int


def group_along(axis: str, meshes: Meshes) -> Group:
    """The groups along an axis of the dense or of the expert mesh; all of them lie alike on a cluster of full units."""
    mesh = meshes.experts if axis in EXPERT_AXES and meshes.experts is not None else meshes.dense
    return Group(mesh.size(axis), mesh.stride(axis))


def parts_of_group(group: Group, cluster: Cluster) -> list[tuple[int, int]]:
    """For each level, from the innermost: the ranks of a group inside one unit of the level below, and how many such
    units of one unit of the level the group has ranks in."""
    parts, inside = list[tuple[int, int]](), 1
    for below, size in _sizes(cluster):
        within = smaller(group.ranks, larger(1, below * size // group.stride))
        parts.append((inside, -(-within // inside)))
        inside = within
    return parts


def outermost_between(ranks: range, others: range, cluster: Cluster) -> Level | None:
    """The outermost level that messages between the ranks of two pipeline stages cross; None if these are the same."""
    pairs = [(ranks[place], others[place]) for place in (0, -1)]
    crossed = [
        level
        for level, (below, size) in zip(cluster.levels, _sizes(cluster), strict=True)
        if any(a // below % size != b // below % size for a, b in pairs)
    ]
    return crossed[-1] if crossed else None


def _sizes(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """For each level the number of ranks in a unit of the level below, and of such units."""
    below = 1
    for level in cluster.levels:
        yield below, level.size
        below *= level.size

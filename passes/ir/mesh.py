"""Named axes over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks, factored into named axes, the outermost first; consecutive ranks differ in the last axis.

    Dense parts and expert parts factor the same ranks differently ("parallel folding", arXiv 2504.14960):
    `dp, cp, tp` and `edp, ep, etp`. All are factors of the ranks of a pipeline stage.
    """

    name: str
    axes: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the axis sizes."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`, which may be a joint one; 1 for an axis that this mesh does not have."""
        if axis in JOINT_AXES:
            return math.prod(map(self.size, JOINT_AXES[axis]))
        return next((size for name, size in self.axes if name == axis), 1)

    def wide_axes(self) -> tuple[str, ...]:
        """The axes with more than one rank: the only ones a layout names."""
        return tuple(axis for axis, size in self.axes if size > 1)

    def joint_axes(self) -> tuple[str, ...]:
        """The joint axes whose first and last part are wide. ZeRO cuts parameters over `dp_cp`; values lie on none."""
        return tuple(joint for joint, (first, *_, last) in JOINT_AXES.items() if min(map(self.size, (first, last))) > 1)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`; an axis that this mesh does not have is of size 1."""
        names, innermost = [name for name, _ in self.axes], parts_of(axis)[-1]
        inner = names.index(innermost) + 1 if innermost in names else len(names)
        return math.prod(size for _, size in self.axes[inner:])

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of `rank` along `axis`."""
        return rank // self.stride(axis) % self.size(axis)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The rank lists along `axis`: each is one communicator, in the order of its coordinate."""
        stride, size = self.stride(axis), self.size(axis)
        first_ranks = (rank for rank in range(self.ranks) if rank // stride % size == 0)
        return tuple(tuple(first + i * stride for i in range(size)) for first in first_ranks)


DENSE_AXES, EXPERT_AXES = ("dp", "cp", "tp"), ("edp", "ep", "etp")
"""The axes of meshes, the outermost first. Ranks that share sequences, and joint axes, are neighbours by this order."""

JOINT_AXES = {"dp_cp_tp": DENSE_AXES, "dp_cp": ("dp", "cp"), "cp_tp": ("cp", "tp")}
"""Neighbouring axes of the dense mesh as one, the largest first: all ranks, those with the same dense weights and other
tokens, and those that share sequences."""

ZERO_AXES = ("dp", "cp", "dp_cp", "edp")
"""The axes that ZeRO cuts: dense parameters over `dp` and `cp`, experts over `edp`."""

CUT_ORDER = ("dp", "cp", "tp", "etp", "edp", "ep")
"""The order in which axes cut one dim of a parameter, the outermost cut first."""


def parts_of(axis: str) -> tuple[str, ...]:
    """The axes of a joint axis; any other axis by itself."""
    return JOINT_AXES.get(axis, (axis,))


def joined(axes: Iterable[str], dense: Mesh) -> tuple[str, ...]:
    """The wide `axes` of a sum of gradients, sorted: one sum over a joint axis, not one over each of its parts."""
    names = set(axes)
    for joint in dense.joint_axes():
        parts = {part for part in parts_of(joint) if dense.size(part) > 1}
        if names >= parts:
            return tuple(sorted((names - parts) | {joint}))
    return tuple(sorted(names))


def group_name(axis: str, experts_mesh: str | None) -> str:
    """The name in a plan of the communicators along `axis`: `dp`, or `ep[4..31]` on the mesh `experts[4..31]`."""
    if axis in EXPERT_AXES:
        assert experts_mesh is not None
        return axis + experts_mesh.removeprefix("experts")
    return axis

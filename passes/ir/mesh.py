"""Named axes over the ranks."""

from __future__ import annotations

import math
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
        """Number of ranks along `axis`; 1 for an axis that this mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def wide_axes(self) -> tuple[str, ...]:
        """The axes with more than one rank: the only ones a layout names."""
        return tuple(axis for axis, size in self.axes if size > 1)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`; an axis that this mesh does not have is of size 1."""
        names = [name for name, _ in self.axes]
        inner = names.index(axis) + 1 if axis in names else len(names)
        return math.prod(size for _, size in self.axes[inner:])

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of `rank` along `axis`."""
        return rank // self.stride(axis) % self.size(axis)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The rank lists along `axis`: each is one communicator, in the order of its coordinate."""
        stride, size = self.stride(axis), self.size(axis)
        first_ranks = (rank for rank in range(self.ranks) if rank // stride % size == 0)
        return tuple(tuple(first + i * stride for i in range(size)) for first in first_ranks)


EXPERT_AXES = ("edp", "ep", "etp")
ZERO_AXES = ("dp", "edp")
"""The axes that ZeRO cuts: dense parameters over `dp`, experts over `edp`."""


def group_name(axis: str, experts_mesh: str | None) -> str:
    """The name in a plan of the communicators along `axis`: `dp`, or `ep[4..31]` on the mesh `experts[4..31]`."""
    if axis in EXPERT_AXES:
        assert experts_mesh is not None
        return axis + experts_mesh.removeprefix("experts")
    return axis

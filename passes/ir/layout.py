"""The layout of a value on a mesh: per axis replicated, sharded along a dim, or a partial sum, as in DTensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, overload


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank along the axis holds an equal piece of dim `dim`.

    For a ragged value `[experts, rows, dim]`, shard(0) means that the rank holds the rows of its experts, from any
    rank, and shard(1) that it holds the rows of its tokens, for any expert.
    """

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank along the axis holds a term; the value is their reduction."""

    reduce: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.reduce})"


Placement = Shard | Partial
_PLACED = re.compile(r"(?P<axis>[a-z_]+):(shard\((?P<dim>[0-9])\)|partial\((?P<reduce>sum|max)\))")


@dataclass(frozen=True, slots=True)
class Layout:
    """A placement per mesh axis. Axes that are not named replicate; axes of size 1 are never named.

    Several axes may shard one dim: each cuts the pieces of the axis before it, as in DTensor. The order of placements
    matters only among the cuts of one dim, so placements are stored in a canonical order that keeps the cuts of a dim
    in their order, side by side: layouts that differ only in other orders are equal.
    """

    placements: tuple[tuple[str, Placement], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", _canonical(self.placements))

    @classmethod
    def of(cls, placements: Mapping[str, Placement] | Iterable[tuple[str, Placement]]) -> Layout:
        """The layout with these placements; axes that shard the same dim are given in the order of their cuts."""
        return cls(tuple(dict(placements).items()))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that prints as `text`. Raises ValueError."""
        if text == "replicate":
            return cls()
        placements: dict[str, Placement] = {}
        for part in text.split(" "):
            match = _PLACED.fullmatch(part)
            if match is None or match["axis"] in placements:
                raise ValueError(f"{text!r} is no layout")
            dim, reduce = match["dim"], match["reduce"]
            placements[match["axis"]] = Shard(int(dim)) if dim else Partial(reduce)
        return cls.of(placements)

    def get(self, axis: str) -> Placement | None:
        """The placement on `axis`; None where it replicates."""
        return dict(self.placements).get(axis)

    def replace(self, axis: str, placement: Placement | None) -> Layout:
        """This layout with another placement on `axis`; None replicates. A new cut is the last cut of its dim."""
        if placement == self.get(axis):
            return self
        placements = tuple((a, p) for a, p in self.placements if a != axis)
        return Layout(placements if placement is None else (*placements, (axis, placement)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes on which the value does not replicate."""
        return tuple([axis for axis, _ in self.placements])

    def sharded_axes(self) -> tuple[str, ...]:
        """The axes on which the value is sharded."""
        return tuple(axis for axis, placement in self.placements if isinstance(placement, Shard))

    def cuts(self, dim: int) -> tuple[str, ...]:
        """The axes that cut `dim`, the outermost cut first."""
        return tuple(axis for axis, placement in self.placements if placement == Shard(dim))

    def only(self, placement: Placement) -> Layout:
        """The axes that have this placement; the others replicate."""
        return Layout.of((axis, p) for axis, p in self.placements if p == placement)

    def as_partial(self, reduce: str = "sum") -> Layout:
        """The layout of a reduction over everything that this layout shards: a partial value on each of its axes."""
        return Layout.of(dict.fromkeys(self.axes, Partial(reduce)))

    def can_undo(self, axis: str) -> bool:
        """Whether one collective over `axis` can undo its placement: only the last cut of a dim can be undone."""
        placement = self.get(axis)
        return not isinstance(placement, Shard) or self.cuts(placement.dim)[-1] == axis

    def refines(self, other: Layout) -> bool:
        """Whether this layout cuts every dim as `other` does, and then perhaps further. Neither has partial sums."""
        if any(isinstance(placement, Partial) for _, placement in (*self.placements, *other.placements)):
            return False
        dims = {placement.dim for _, placement in other.placements if isinstance(placement, Shard)}
        return all(self.cuts(dim)[: len(other.cuts(dim))] == other.cuts(dim) for dim in dims)

    def in_order_of(self, axes: Iterable[str]) -> Layout:
        """This layout with the cuts of every dim in the order of `axes`. DTensor supports only the mesh's order."""
        return Layout.of((axis, placement) for axis in axes if (placement := self.get(axis)) is not None)

    def __str__(self) -> str:
        return " ".join(f"{axis}:{placement}" for axis, placement in self.placements) or "replicate"


def _canonical(placements: Sequence[tuple[str, Placement]]) -> tuple[tuple[str, Placement], ...]:
    """Cuts of one dim in the order given and side by side; dims and partial sums sorted by their first axis."""
    if len(placements) < 2:
        return tuple(placements)
    by_dim: dict[object, list[tuple[str, Placement]]] = {}
    for axis, placement in placements:
        key = placement.dim if isinstance(placement, Shard) else axis
        by_dim.setdefault(key, []).append((axis, placement))
    in_order = sorted(by_dim.values(), key=lambda cuts: cuts[0][0])
    return tuple(placed for cuts in in_order for placed in cuts)


REPLICATED = Layout()


# ---- one rank's part -----------------------------------------------------------------------------------


class AxisSizes(Protocol):
    """The sizes of mesh axes: a `Mesh`, or the `Meshes` of a block."""

    def size(self, axis: str, /) -> int:
        """Number of ranks along `axis`."""
        ...


class Coordinates(AxisSizes, Protocol):
    """The sizes of mesh axes and the coordinates of each rank: a `Mesh`."""

    def coordinate(self, rank: int, axis: str, /) -> int:
        """Position of `rank` along `axis`."""
        ...


@overload
def local_shape(shape: Sequence[int], layout: Layout, mesh: AxisSizes) -> tuple[int, ...]: ...


@overload
def local_shape(shape: Sequence[int | str], layout: Layout, mesh: AxisSizes) -> tuple[int | str, ...]: ...


def local_shape(shape: Sequence[int | str], layout: Layout, mesh: AxisSizes) -> tuple[int | str, ...]:
    """The shape of one rank's part of a value of global `shape`. Symbols stay as they are.

    Every cut must divide its dim: a remainder would be lost (`degree_rules` and the verifier reject it).
    """
    local = list(shape)
    for axis, placement in layout.placements:
        if isinstance(placement, Shard) and not isinstance(size := local[placement.dim], str):
            local[placement.dim] = size // mesh.size(axis)
    return tuple(local)


def local_slices(shape: Sequence[int], layout: Layout, mesh: Coordinates, rank: int) -> tuple[slice, ...]:
    """The index of `rank`'s part, which has the `local_shape`, in a tensor of global `shape`."""
    starts, sizes = [0] * len(shape), list(shape)
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            sizes[placement.dim] //= mesh.size(axis)
            starts[placement.dim] += sizes[placement.dim] * mesh.coordinate(rank, axis)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))

"""How a value lies on a mesh: per axis replicated, sharded along a dim, or a partial sum, as DTensor names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank along the axis holds an equal piece of dim `dim`.

    For a ragged value `[experts, rows, dim]`, shard(0) means the rank holds the rows of its experts, whatever
    rank they came from, and shard(1) the rows of its own tokens, whatever expert they go to.
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
_PLACED = re.compile(r"(?P<axis>[a-z]+):(shard\((?P<dim>[0-9])\)|partial\((?P<reduce>sum|max)\))")


@dataclass(frozen=True, slots=True)
class Layout:
    """A placement per mesh axis. Axes that are not named replicate; axes of size 1 are never named."""

    placements: tuple[tuple[str, Placement], ...] = ()

    @classmethod
    def of(cls, placements: Mapping[str, Placement] | Iterable[tuple[str, Placement]]) -> Layout:
        """The layout with these placements, in one canonical order."""
        return cls(tuple(sorted(dict(placements).items())))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that prints as `text`. Raises ValueError."""
        if text == "replicate":
            return cls()
        placements: dict[str, Placement] = {}
        for part in text.split(" "):
            found = _PLACED.fullmatch(part)
            if found is None or found["axis"] in placements:
                raise ValueError(f"{text!r} is no layout")
            dim, reduce = found["dim"], found["reduce"]
            placements[found["axis"]] = Shard(int(dim)) if dim else Partial(reduce)
        return cls.of(placements)

    def get(self, axis: str) -> Placement | None:
        """The placement on `axis`; None where it replicates."""
        return dict(self.placements).get(axis)

    def replace(self, axis: str, placement: Placement | None) -> Layout:
        """This layout with `axis` placed otherwise; None replicates."""
        changed = {a: p for a, p in self.placements if a != axis}
        if placement is not None:
            changed[axis] = placement
        return Layout.of(changed)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes on which the value does not replicate."""
        return tuple(axis for axis, _ in self.placements)

    def sharded_axes(self) -> tuple[str, ...]:
        """The axes on which the value is sharded."""
        return tuple(axis for axis, placement in self.placements if isinstance(placement, Shard))

    def __str__(self) -> str:
        return " ".join(f"{axis}:{placement}" for axis, placement in self.placements) or "replicate"


REPLICATED = Layout()

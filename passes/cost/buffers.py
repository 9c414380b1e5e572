"""Tensors that are alive, and the bytes that they take by kind."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from moec.passes.ir.work.arrays import is_number, larger

MemoryKind = Literal[
    "parameters",
    "compute copies",
    "gradients",
    "optimizer",
    "activations",
    "work",
    "communication",
    "logits and loss",
    "device",
]
"""What bytes are for: `activations` are saved for backward, `work` are values and gradients in use."""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes by kind."""

    of: Mapping[MemoryKind, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(self.of.values())

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes({t: self.of.get(t, 0.0) + other.of.get(t, 0.0) for t in (*self.of, *other.of)})

    def times(self, number: int) -> Bytes:
        """The bytes of so many equal buffers."""
        return Bytes({kind: number * size for kind, size in self.of.items()})

    def as_one(self, kind: MemoryKind) -> Bytes:
        """These bytes, all as one kind."""
        return Bytes({kind: self.total})


def largest(*moments: Bytes) -> Bytes:
    """The moment with the most bytes. Of several plans at once the most bytes of each, which have no kind: `work`."""
    totals = [moment.total for moment in moments]
    if all(map(is_number, totals)):
        return moments[max(range(len(totals)), key=totals.__getitem__)]
    return Bytes({"work": functools.reduce(larger, totals)})


class Buffers:
    """Tensors by name; several names may share one tensor, which the last name frees.

    `bytes` counts the tensors of `beside` too.
    """

    def __init__(self, beside: Buffers | None = None) -> None:
        self._beside = beside
        self._tensors: dict[int, tuple[MemoryKind, float]] = {}
        self._numbers: dict[str, int] = {}
        self._uses: dict[int, int] = {}
        self._totals = dict.fromkeys(MEMORY_KINDS, 0.0)
        self._made = 0

    def copy(self) -> Buffers:
        """The same tensors, beside the same others."""
        copied = Buffers(self._beside)
        copied._tensors, copied._numbers, copied._uses = dict(self._tensors), dict(self._numbers), dict(self._uses)
        copied._totals, copied._made = dict(self._totals), self._made
        return copied

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def add(self, name: str, kind: MemoryKind, size: float) -> None:
        """A new tensor, which replaces another of this name."""
        self.drop(name)
        self._made += 1
        self._numbers[name] = self._made
        self._uses[self._made] = 1
        self._tensors[self._made] = kind, size
        self._totals[kind] = self._totals[kind] + size

    def add_all(self, name: str, sizes: Bytes) -> None:
        """One tensor `name kind` for each kind of `sizes`."""
        for kind, size in sizes.of.items():
            self.add(f"{name} {kind}", kind, size)

    def alias(self, name: str, other: str) -> None:
        """Gives the tensor of `other` one more name."""
        self.drop(name)
        number = self._numbers[other]
        self._numbers[name] = number
        self._uses[number] += 1

    def save(self, name: str, size: float, kind: MemoryKind = "activations") -> None:
        """Keeps a value, or a tensor inside an op, for backward, as `saved name`."""
        saved = f"saved {name}"
        if saved in self:
            return
        if name not in self:
            self.add(saved, kind, size)
            return
        self.alias(saved, name)
        number = self._numbers[name]
        before, size = self._tensors[number]
        self._totals[before] = self._totals[before] - size
        self._totals[kind] = self._totals[kind] + size
        self._tensors[number] = kind, size

    def is_shared(self, name: str) -> bool:
        """Whether the tensor has other names too."""
        return self._uses[self._numbers[name]] > 1

    def drop(self, name: str) -> None:
        """Takes a name away, if there is one; the last name frees the tensor."""
        number = self._numbers.pop(name, None)
        if number is None:
            return
        self._uses[number] -= 1
        if not self._uses[number]:
            kind, size = self._tensors.pop(number)
            self._totals[kind] = self._totals[kind] - size
            del self._uses[number]

    def drop_all(self, name: str) -> None:
        """Drops what `add_all` added under this name."""
        for kind in MEMORY_KINDS:
            self.drop(f"{name} {kind}")

    def alone(self) -> Bytes:
        """Bytes by kind, without those of `beside`."""
        return Bytes({kind: size for kind, size in self._totals.items() if _is_some(size)})

    def bytes(self, more: float = 0.0) -> Bytes:
        """Bytes by kind, with `more` bytes of work."""
        totals = (
            {kind: self._beside._totals[kind] + size for kind, size in self._totals.items()} if self._beside else {}
        )
        sizes = {kind: size for kind, size in (totals or self._totals).items() if _is_some(size)}
        if not is_number(more) or more:
            sizes["work"] = sizes.get("work", 0.0) + more
        return Bytes(sizes)


def _is_some(size: float) -> bool:
    """Whether it is more than sums lose by rounding."""
    return not is_number(size) or size >= 1

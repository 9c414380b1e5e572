"""What every registered conversion must do, from its placements alone: a value lies so before, and so after.

A conversion changes where a value lies and not the value. So the gradient of the operand is the gradient of the value,
as the operand lies; and that is the sum of the ranks' terms, where ops sharded on the axis consume the result. Nothing
here asks a class for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from moec.passes.ir import Partial, Placement, Shard
from moec.passes.ir.op import operand_names
from moec.passes.ir.operator_schema import given_attributes
from moec.passes.ir.ops.conversion import Conversion, Kind, matching

PLACEMENTS: tuple[Placement | None, ...] = (None, Shard(0), Shard(1), Partial(), Partial("max"))
KINDS: tuple[Kind, ...] = ("dense", "row counts", "rows")
RANKS = (1, 2, 4)
EXPERTS, DIM = 8, 3

LOADS: Mapping[Kind, tuple[str, ...]] = {
    "dense": ("full", "empty"),
    "row counts": ("uneven",),
    "rows": ("uneven", "a rank has none", "the last experts have none", "no rows at all"),
}


@dataclass(frozen=True)
class Case:
    """A conversion of one kind of value; `load` says how large the ranks' parts are."""

    kind: Kind
    conversion: Conversion
    load: str

    def __str__(self) -> str:
        attributes = (f"{name} {value}" for name, value in self.conversion.attributes().items() if name != "axis")
        return ", ".join((self.conversion.mnemonic, *attributes, f"{self.load} {self.kind}"))

    @property
    def operator(self) -> str:
        return self.conversion.torch_operator()

    @property
    def attributes(self) -> tuple[object, ...]:
        """The attributes that the operator takes."""
        return tuple(getattr(self.conversion, name) for name in given_attributes(type(self.conversion)))

    @property
    def differentiated(self) -> bool:
        return self.kind != "row counts" and self.conversion.source() != Partial("max")

    def operands(self, ranks: int) -> list[list[Tensor]]:
        """Each operand of the operator on every rank."""
        whole, of_type = _whole(self, ranks, seed=0), type(self.conversion)
        _, *names = (name for name in operand_names(of_type)[0] if name not in of_type.typing)
        operands = [BESIDE[name](self.conversion, counts_of(ranks, self.load)) for name in names]
        return [whole.laid(self.conversion.source()), *operands]

    def results(self, ranks: int) -> list[Tensor]:
        """The first result on every rank."""
        whole, target = _whole(self, ranks, seed=0), self.conversion.target()
        if isinstance(target, Partial):  # terms of the value: itself, and zeros
            first, *others = whole.laid(None)
            return [first, *map(torch.zeros_like, others)]
        return whole.laid(target)

    def given_gradients(self, ranks: int) -> list[Tensor]:
        """The gradient of the result that each rank's consumers give."""
        whole, target = _whole(self, ranks, seed=1), self.conversion.target()
        if self.conversion.partial_gradient:
            return whole.laid(Partial())
        return whole.laid(None if isinstance(target, Partial) else target)

    def gradients(self, ranks: int) -> list[Tensor]:
        """The gradient of the operand on every rank; every term of a sum has the sum's gradient."""
        source = self.conversion.source()
        return _whole(self, ranks, seed=1).laid(None if isinstance(source, Partial) else source)


CASES = [
    Case(kind, conversion, load)
    for kind, source, target, partial in product(KINDS, PLACEMENTS, PLACEMENTS, (False, True))
    for conversion in matching(kind, "tp", source, target, partial_gradient=partial)
    for load in LOADS[kind]
]
"""Every conversion from any of these placements to any other, with every attribute."""


# ---- where a value lies --------------------------------------------------------------------------------


def counts_of(ranks: int, load: str) -> Tensor:
    """The rows that each rank's tokens have for each expert: [ranks, experts]."""
    counts = torch.randint(0, 4, (ranks, EXPERTS), generator=torch.Generator().manual_seed(2))
    if load == "a rank has none":
        counts[0] = 0
    if load == "the last experts have none":
        counts[:, -(EXPERTS // ranks) :] = 0
    if load == "no rows at all":
        counts[:] = 0
    return counts


def _splits(conversion: Conversion, counts: Tensor) -> list[Tensor]:
    """The rows that each rank sends to, and receives from, each other rank, when rows leave the rank of their tokens:
    for the rank of their experts, or for every rank."""
    leave_for_experts = Shard(0) in (conversion.source(), conversion.target())
    to = counts.view(len(counts), len(counts), -1).sum(2) if leave_for_experts else counts.sum(1, keepdim=True)
    to = to.expand(len(counts), len(counts))
    return [torch.stack([to[rank], to[:, rank]]) for rank in range(len(counts))]


BESIDE: Mapping[str, Callable[[Conversion, Tensor], list[Tensor]]] = {"splits": _splits}
"""Operands beside the value, on every rank, by the names that classes declare."""


@dataclass(frozen=True)
class _Whole:
    """A value of all ranks: `parts` gives it as it lies where it is replicated or cut."""

    ranks: int
    parts: Callable[[Placement | None], list[Tensor]]

    def laid(self, placement: Placement | None) -> list[Tensor]:
        """What each rank holds."""
        if not isinstance(placement, Partial):
            return [part.clone() for part in self.parts(placement)]
        whole = self.parts(None)[0]
        terms = [_drawn(whole.shape, seed=10 + rank).to(whole.dtype) for rank in range(self.ranks)]
        if placement.reduce == "sum":
            return [*terms[1:], whole - sum(terms[1:], torch.zeros_like(whole))]
        return [whole - term.abs() for term in terms[1:]] + [whole]


def _drawn(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _whole(case: Case, ranks: int, seed: int) -> _Whole:
    match case.kind:
        case "dense":
            return _dense(_drawn((8 if case.load == "full" else 0, 12, DIM), seed), ranks)
        case "row counts":
            return _dense(counts_of(ranks, case.load), ranks)
    counts = counts_of(ranks, case.load)
    rows = _drawn((int(counts.sum()), DIM), seed)
    return _rows(counts, rows)


def _dense(whole: Tensor, ranks: int) -> _Whole:
    def parts(placement: Placement | None) -> list[Tensor]:
        if placement is None:
            return [whole for _ in range(ranks)]
        assert isinstance(placement, Shard)
        each = whole.shape[placement.dim] // ranks
        return [whole.narrow(placement.dim, rank * each, each) for rank in range(ranks)]

    return _Whole(ranks, parts)


def _rows(counts: Tensor, whole: Tensor) -> _Whole:
    """`whole` are the rows source by source, each source's by expert."""
    ranks, held = len(counts), EXPERTS // len(counts)
    blocks = dict(zip(product(range(ranks), range(EXPERTS)), whole.split(counts.flatten().tolist()), strict=True))

    def parts(placement: Placement | None) -> list[Tensor]:
        found = []
        for rank in range(ranks):
            sources = [rank] if placement == Shard(1) else range(ranks)
            experts = range(rank * held, (rank + 1) * held) if placement == Shard(0) else range(EXPERTS)
            found.append(torch.cat([blocks[source, expert] for source in sources for expert in experts]))
        return found

    return _Whole(ranks, parts)


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The first of an operator's results."""
    return result[0] if isinstance(result, tuple) else result

"""The base of every op. One op, one room: its class holds all that the compiler knows of it but its lowering to FX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from moec.passes.ir.layout import REPLICATED, Layout, Shard
from moec.passes.ir.mesh import EXPERT_AXES, Mesh
from moec.passes.ir.source_line import SourceLine
from moec.passes.ir.value import Attribute, Dim, Value

if TYPE_CHECKING:
    from moec.passes.ir.program import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """Shape and dtype of a result, before it has a name or a layout."""

    shape: tuple[Dim, ...]
    dtype: str
    ragged: str | None = None


TOKEN_DIM_OF = {"dp": 0, "tp": 1}
"""Which dim of `[batch, sequence]` an axis of the dense mesh shards."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """The two factorisations of the ranks that a block's values lie on, and how the residual stream lies.

    `tokens` is the layout of `[batch, sequence, dim]` between the ops that tensor parallelism shards: with sequence
    parallelism every rank has tokens of its own, without it the ranks of a tp group have the same ones.
    """

    dense: Mesh
    experts: Mesh | None = None
    tokens: Layout = REPLICATED

    def size(self, axis: str) -> int:
        """Number of ranks along `axis` of either mesh."""
        mesh = self.experts if axis in EXPERT_AXES and self.experts is not None else self.dense
        return mesh.size(axis)

    @property
    def own_tokens(self) -> Layout:
        """Tokens of which no two ranks have one in common: sequences over `dp`, and parts of each over `tp`."""
        return Layout.of({axis: Shard(TOKEN_DIM_OF[axis]) for axis in self.dense.wide_axes()})


@dataclass(frozen=True, slots=True)
class Placing:
    """An op's layout rule, applied: what it wants its operands to be, and what its results then are."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


class LayoutError(Exception):
    """An op has no rule for operands laid out like this: a bug in a pass, never a user's mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op(ABC):
    """One operation in a block. Operands are names: `x` is a value, `@gate.weight` a parameter."""

    mnemonic: ClassVar[str]
    registry: ClassVar[dict[str, type[Op]]] = {}
    constants: ClassVar[frozenset[int]] = frozenset()
    """Positions of operands that no gradient flows to, whatever their dtype."""
    moves: ClassVar[bool] = False
    """Whether it takes values elsewhere, to another layout, mesh or block, and so does no part of a work on them."""

    operands: tuple[str, ...]
    results: tuple[Value, ...] = ()
    span: SourceLine | None = field(default=None, compare=False, repr=False)

    @abstractmethod
    def infer(self, operands: Sequence[Value], blocks: Mapping[str, Block]) -> tuple[Type, ...]:
        """Types of the results. Raises `TypeRuleError` where the operands do not fit."""

    @abstractmethod
    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Mapping[str, Block]) -> Placing:
        """The layout rule. Raises `LayoutError` where there is none."""

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        """Multiply-adds times two of one forward pass over all ranks; element-wise work counts as nothing."""
        return 0

    def attributes(self) -> dict[str, Attribute]:
        """The op's own fields, in order."""
        return {name: getattr(self, name) for name in self.attribute_names()}

    @classmethod
    def attribute_names(cls) -> tuple[str, ...]:
        """The names of the op's own fields, in order."""
        return _attribute_names(cls)

    def with_results(self, results: Sequence[Value]) -> Self:
        """This op with other results."""
        return replace(self, results=tuple(results))


_BASE_FIELDS = frozenset(f.name for f in fields(Op))


@cache
def _attribute_names(op: type[Op]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(op) if f.name not in _BASE_FIELDS)


T = TypeVar("T", bound=Op)


class TypeRuleError(Exception):
    """Operands do not fit an op: a bug in a pass, never a user's mistake."""


def register(cls: type[T]) -> type[T]:
    """Makes an op known to the parser of the text form."""
    assert cls.mnemonic not in Op.registry, cls.mnemonic
    Op.registry[cls.mnemonic] = cls
    return cls


def require(condition: bool, op: Op, complaint: str) -> None:
    """A type rule's check."""
    if not condition:
        raise TypeRuleError(f"{op.mnemonic} {', '.join(op.operands)}: {complaint}")


def layout_of(value: Value) -> Layout:
    """The layout of a value that must have one by now."""
    if value.layout is None:
        raise LayoutError(f"{value.name} has no layout yet")
    return value.layout


def gradient_sums(op: Op, operands: Sequence[Value], placing: Placing) -> tuple[frozenset[str], ...]:
    """For each operand, the axes on which its gradient is a partial sum: the one gradient rule.

    They are the axes on which it is replicated while the op's other operands or results are not: there every rank does
    a part of the work. What is not differentiated has none.
    """
    if op.moves:
        return (frozenset(),) * len(operands)
    working = {axis for layout in (*placing.operands, *placing.results) for axis in layout.axes}
    return tuple(
        frozenset(working.difference(layout.axes) if value.dtype != "int64" and i not in op.constants else ())
        for i, (value, layout) in enumerate(zip(operands, placing.operands, strict=True))
    )


def size_of(shape: Sequence[Dim], sizes: Mapping[str, int]) -> int:
    """Number of elements, symbols taken from `sizes`."""
    total = 1
    for dim in shape:
        total *= dim if isinstance(dim, int) else sizes[dim]
    return total

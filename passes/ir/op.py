"""The base class of ops. An op's class holds everything that the compiler knows of the op, except its FX lowering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform

from moec.passes.ir.layout import REPLICATED, Layout, Shard
from moec.passes.ir.mesh import EXPERT_AXES, Mesh
from moec.passes.ir.source_line import SourceLine
from moec.passes.ir.value import Attribute, Dim, State, Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.program import Block
    from moec.passes.ir.work.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """Shape and dtype of a result, before it has a name or a layout."""

    shape: tuple[Dim, ...]
    dtype: str
    ragged: str | None = None


TOKEN_DIM_OF = {"dp": 0, "cp": 1, "tp": 1}
"""Which dim of `[batch, sequence]` an axis of the dense mesh shards."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """The dense and the expert mesh of a block, and the layout of the residual stream.

    `tokens` is the layout of `[batch, sequence, dim]` between the ops that tensor parallelism shards: with sequence
    parallelism the ranks of a tp group hold different tokens, without it the same tokens.
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
        """The layout with different tokens on every rank: sequences cut over `dp`, each sequence over `cp`, then
        over `tp`."""
        return Layout.of({axis: Shard(TOKEN_DIM_OF[axis]) for axis in self.dense.wide_axes()})

    @property
    def sharers(self) -> int:
        """Number of ranks that share a sequence. Each has a piece of it in a mixture."""
        return self.dense.size("cp") * self.dense.size("tp")


@dataclass(frozen=True, slots=True)
class Placing:
    """The result of an op's layout rule: the layouts that its operands need, and the layouts of its results."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


class LayoutError(Exception):
    """An op has no rule for operands laid out like this: a bug in a pass, never a user's mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op(ABC):
    """One operation in a block. Its class declares what the text form, its torch operator's schema, its emission and
    the check of a loaded file need.

    `operands` are names of values (`x`), parameters (`@gate.weight`), settings (`$training`) and states (`^gate.bias`):
    the required operands in the order of the class, then the optional operands that `optional` names.
    """

    mnemonic: ClassVar[str]
    registry: ClassVar[dict[str, type[Op]]] = {}
    takes: ClassVar[str]
    """Names of operands, in order: `x` is required, `bias?` is optional, `terms*` is any number of operands."""
    gives: ClassVar[str]
    """Names of results, in order; `*` for the results of a called block."""
    operator: ClassVar[str | None] = None
    """The torch operator `moec::…` that computes the op; None for a composition of operators (`codegen/emit`)."""
    saved: ClassVar[str] = ""
    """Names of further results of the torch operator, which it saves for backward."""
    resolved: ClassVar[Mapping[str, str]] = {}
    """Maps an attribute to the operator's arguments that replace it, from the meshes (`{"axis": "str group"}`)."""
    typing: ClassVar[frozenset[str]] = frozenset()
    """Operands that only the type rule needs; the torch operator does not take them."""
    sited: ClassVar[bool] = False
    """Whether the torch operator takes the name of the part of the model that it belongs to, for messages."""
    numbered: ClassVar[bool] = False
    """Whether the torch operator takes the layer's number, after its operands."""
    tiled: ClassVar[bool] = False
    """Whether the torch operator takes the kernels of its products (`Ways`), after its attributes."""
    scores: ClassVar[str] = ""
    """The operand by which the op chooses experts; its result `experts` follows from it, and so does `weights`, if it
    has one. Empty for other ops."""
    chooses: ClassVar[str] = ""
    """Names of int64 results that depend on an order of scores, beside those of `scores`: recomputation keeps them, and
    `moec verify` repeats them in other dtypes."""
    copies_to_host: ClassVar[bool] = False
    """Whether results are counts of rows that the host reads: recomputation keeps them, and does not wait again."""
    sparse: ClassVar[bool] = False
    """Of an op that chooses experts: whether a token has a choice of each expert, of which most are −1."""
    constants: ClassVar[frozenset[str]] = frozenset()
    """Operands that no gradient flows to, whatever their dtype."""
    moves: ClassVar[bool] = False
    """Whether the op moves values to another layout, mesh or block: it makes no gradient a partial sum."""

    operands: tuple[str, ...]
    optional: tuple[str, ...] = ()
    results: tuple[Value, ...] = ()
    span: SourceLine | None = field(default=None, compare=False, repr=False)

    @abstractmethod
    def infer(self, operands: Sequence[Value], blocks: Mapping[str, Block]) -> tuple[Type, ...]:
        """Types of the results. Raises `TypeRuleError` where the operands do not fit."""

    @abstractmethod
    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Mapping[str, Block]) -> Placing:
        """The layout rule. Raises `LayoutError` where there is none."""

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        """The cost of one run on a rank. Default: an element-wise op that saves no activation."""
        return elementwise(self, operands, results, workload)

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        """The sizes, over all ranks, of new symbols in the results' shapes, and of groups of experts. The first op to
        bind a symbol decides."""
        return {}

    def other_tokens(self, operands: Sequence[Value]) -> str:
        """The reason, in words of the language, why a token's result depends on other tokens in evaluation; else empty.

        An op with such a reason cannot generate token by token. Earlier tokens in an attention cache are no reason.
        """
        return f"`{self.mnemonic}`, which looks at several tokens"

    def named(self, operands: Sequence[Any]) -> dict[str, Any]:
        """`operands` (of any Python type) by the names that the class declares; absent optional operands are missing.

        Raises `TypeRuleError` where they do not match the class.
        """
        names, complaint = _names_of(type(self), self.optional, len(operands))
        require(not complaint, self, complaint)
        return dict(zip(names, operands, strict=True))

    def torch_operator(self) -> str:
        """The name of its torch operator."""
        assert self.operator is not None, self
        return self.operator

    @classmethod
    def taking(cls, operands: Mapping[str, str]) -> dict[str, Any]:
        """The fields `operands` and `optional` of an op, from operands by the names that the class declares."""
        required, optional = operand_names(cls)
        present = tuple(name for name in optional if name in operands)
        return {"operands": tuple(operands[name] for name in (*required, *present)), "optional": present}

    def attributes(self) -> dict[str, Attribute]:
        """The op's attributes by name, in order."""
        return {name: getattr(self, name) for name in self.attribute_names()}

    @classmethod
    def attribute_names(cls) -> tuple[str, ...]:
        """The names of the op's attributes, in order: the fields that `Op` does not have."""
        return _attribute_names(cls)

    @classmethod
    def attribute_defaults(cls) -> Mapping[str, Attribute]:
        """The values of attributes that the text form and a call may leave out, by name."""
        return _attribute_defaults(cls)

    def with_results(self, results: Sequence[Value]) -> Self:
        """This op with other results."""
        return replace(self, results=tuple(results))


_BASE_FIELDS = frozenset(f.name for f in fields(Op))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOp(Op):
    """Base of ops that in evaluation compute a token from no other token."""

    def other_tokens(self, operands: Sequence[Value]) -> str:
        return ""


@cache
def operand_names(op: type[Op]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of an op's required operands (`terms*` last, for any number) and of its optional operands."""
    names = op.takes.split()
    return tuple(n for n in names if n[-1] != "?"), tuple(n[:-1] for n in names if n[-1] == "?")


@cache
def _names_of(op: type[Op], given: tuple[str, ...], number: int) -> tuple[tuple[str, ...], str]:
    """The names of `number` operands of an op, of which `given` are optional, and why they do not match its class."""
    required, optional = operand_names(op)
    names = (*required, *given)
    if required[-1].endswith("*"):
        names = (*required[:-1], *(f"{required[-1][:-1]}{i}" for i in range(number - len(required) + 1)))
    if tuple(name for name in optional if name in given) != given:
        return names, f"takes {', '.join(optional) or 'nothing'} beside, in this order"
    return names, "" if number == len(names) else f"takes {', '.join(names)}, not {number} operands"


@cache
def _attribute_names(op: type[Op]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(op) if f.name not in _BASE_FIELDS)


@cache
def _attribute_defaults(op: type[Op]) -> Mapping[str, Attribute]:
    names = op.attribute_names()
    return {f.name: f.default for f in fields(op) if f.name in names and f.default is not MISSING}


T = TypeVar("T", bound=Op)
ClassVariable = str | bool | tuple[str, str] | set[str] | Mapping[str, str] | None
"""The value of a class variable of an op; a set becomes a frozen one."""


class TypeRuleError(Exception):
    """Operands do not fit an op: a bug in a pass, never a user's mistake."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def op(mnemonic: str, signature: str = "", **variables: ClassVariable) -> Callable[[type[T]], type[T]]:
    """Makes a class an op that the text form can name, and a frozen dataclass of its attributes.

    `signature` is the class's `takes` and `gives`, `"x bias? -> y"`; without one the class inherits both.
    `variables` are other class variables of `Op` or of a base class between.
    """

    def register(cls: type[T]) -> type[T]:
        takes, arrow, gives = signature.partition("->")
        variables.update({"mnemonic": mnemonic} | ({"takes": takes.strip(), "gives": gives.strip()} if arrow else {}))
        for name, value in variables.items():
            assert name in ("mnemonic", "takes", "gives") or hasattr(cls, name), f"{cls.__name__} has no {name}"
            setattr(cls, name, frozenset(value) if isinstance(value, set) else value)
        assert mnemonic not in Op.registry, mnemonic
        op_class = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        Op.registry[mnemonic] = op_class
        return op_class

    return register


def require(condition: bool, op: Op, complaint: str) -> None:
    """Checks a condition of a type rule. Raises `TypeRuleError`."""
    if not condition:
        raise TypeRuleError(f"{op.mnemonic} {', '.join(op.operands)}: {complaint}")


def layout_of(value: Value) -> Layout:
    """The layout of a value. Raises `LayoutError` where the value has none yet."""
    if value.layout is None:
        raise LayoutError(f"{value.name} has no layout yet")
    return value.layout


def gradient_sums(op: Op, operands: Sequence[Value], placing: Placing) -> tuple[frozenset[str], ...]:
    """For each operand, the axes on which its gradient is a partial sum: the one gradient rule.

    On these axes the operand is replicated and another operand or a result is not, so each rank computes one term of
    the gradient. Operands that are not differentiated, states among them, have no such axes.
    """
    if op.moves:
        return (frozenset(),) * len(operands)
    names = op.named(operands)
    used_axes = {axis for layout in (*placing.operands, *placing.results) for axis in layout.axes}
    return tuple(
        frozenset(used_axes.difference(layout.axes) if _has_gradient(op, name, value) else ())
        for name, value, layout in zip(names, operands, placing.operands, strict=True)
    )


def _has_gradient(op: Op, name: str, value: Value) -> bool:
    return value.dtype != "int64" and not isinstance(value, State) and name not in op.constants

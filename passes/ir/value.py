"""Values, parameters, states and settings: the operands and results of ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from moec.passes.ir.layout import Layout, Shard
from moec.passes.ir.limits import MAX_SETTING
from moec.passes.ir.roles import Role
from moec.passes.ir.source_line import SourceLine

Dim = int | str
"""A constant, or one of `SYMBOLS`."""

SYMBOLS = frozenset({"batch", "sequence", "rows", "sources", "places", "pieces", "data_ranks"})
"""Sizes unknown when compiling: `rows` of a ragged value, `sources` (ranks that sent rows), `places` of an expert with
a capacity, `pieces` of a sequence (one per rank of tp), `data_ranks` (data-parallel ranks)."""

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int64": 8}


def promoted(dtype: str) -> str:
    """`promote_types(dtype, float32)`: the dtype in which routers, norms and losses compute."""
    return dtype if dtype in ("fp32", "fp64") else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The result of an op or an input of a block.

    A ragged value has shape `[experts, "rows", dim]`, and `ragged` names the value that counts its rows per source
    and expert. In memory it is a matrix of rows, sorted by source, then by expert. Inputs have a `role`.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    layout: Layout | None = None
    ragged: str | None = None
    role: Role | None = None

    @property
    def is_row_counts(self) -> bool:
        """Whether the value counts rows per source and expert, `[sources, experts]`, as `ragged` requires."""
        return self.dtype == "int64" and len(self.shape) == 2 and self.shape[0] == "sources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """Initial values of a parameter: `ones`, `zeros`, or `normal(std)`."""

    kind: str
    std: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}({self.std!r})" if self.kind == "normal" else self.kind


@dataclass(frozen=True, slots=True)
class Matrices:
    """A parameter as a stack of matrices or of vectors.

    Its first `stack` dims number them (experts, and the two halves of a gated `up`). The next `rows` dims are rows; 0
    for vectors. All others are columns. `hidden`: they map hidden vectors to hidden vectors, as projections and experts
    do, but not embeddings, the head and routers.
    """

    stack: int = 0
    rows: int = 0
    hidden: bool = False

    def dims_of_rows(self) -> range:
        """The dims that are rows."""
        return range(self.stack, self.stack + self.rows)

    def dims_of_columns(self, rank: int) -> range:
        """The dims that are columns, of a parameter with `rank` dims."""
        return range(self.stack + self.rows, rank)


VECTOR = Matrices()
"""Norms and biases."""


class Stored:
    """The four layouts of a parameter of a Program or of a plan. Each cuts it as the one before does, or further.

    `layout` is how ops use it, `weight` how it is stored between uses, `gradient` that of its gradient once summed,
    `optimizer_state` that of the optimizer's state and of the fp32 master.
    """

    __slots__ = ()
    layout: Layout | None
    weight: Layout | None
    gradient: Layout | None
    optimizer_state: Layout | None

    @property
    def gathered(self) -> Literal["never", "per step", "per use"]:
        """`per use` (ZeRO 3); `per step`: once, from the masters (ZeRO 1 and 2); or `never`."""
        if self.weight != self.layout:
            return "per use"
        return "per step" if self.optimizer_state != self.layout else "never"

    @property
    def scattered_per_pass(self) -> bool:
        """Whether each backward pass scatters its gradient (ZeRO 2 and 3); else the last one of a step does, if any."""
        return self.gradient != self.layout

    @property
    def gathered_over(self) -> tuple[str, ...]:
        """The axes over which it is gathered, and its gradient scattered."""
        cuts = self.optimizer_state.axes if self.optimizer_state is not None else ()
        return tuple(axis for axis in cuts if self.layout is None or axis not in self.layout.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Value, Stored):
    """A learned tensor of a block, named relative to it (`attention.q.weight`).

    `decays` says whether weight decay applies. `shard` gives the dim that each axis cuts, if the axis has several ranks
    and divides the dim; the `shard` pass turns `shard` into the layout and empties it. `sum_over` are the mesh axes
    over which the gradient is summed (see `gradient_sums`), None until the `communicate` pass.

    Ops use `guests` more experts than are stored, behind each rank's own along the axis that cuts dim 0: slots for the
    weights of experts of other ranks, as a `Table` says. 0 for none.

    Its layouts (`Stored`) are None until it is placed. `matrices` says what optimizers of whole matrices take as one
    matrix.

    A `frozen` parameter does not train: it has no gradient, no sum of one and no optimizer state, and `gradient` and
    `optimizer_state` are those of its weight. Gradients flow through the ops that use it.
    """

    init: Init
    decays: bool
    frozen: bool = False
    matrices: Matrices = VECTOR
    shard: tuple[tuple[str, int], ...] = ()
    sum_over: tuple[str, ...] | None = None
    guests: int = 0
    weight: Layout | None = None
    gradient: Layout | None = None
    optimizer_state: Layout | None = None
    span: SourceLine | None = field(default=None, compare=False, repr=False)

    def placed(self, layout: Layout) -> Self:
        """This parameter used in `layout`, and with its weight, gradient and optimizer state in the same layout."""
        return replace(self, layout=layout, weight=layout, gradient=layout, optimizer_state=layout)

    @property
    def is_of_experts(self) -> bool:
        """Whether the ranks of `ep` cut it by experts."""
        return self.layout is not None and self.layout.get("ep") == Shard(0)

    def used(self) -> Self:
        """This parameter as ops use it: with its guests."""
        experts = self.shape[0] if self.shape else 0
        if not self.guests or not isinstance(experts, int):
            return self
        return replace(self, shape=(experts + self.guests, *self.shape[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Value):
    """A tensor of a layer that training changes without a gradient, named as parameters are (`moe.gate.bias`).

    Ops read it as a constant. The block that `Block.update` names gives its new value, once per training step. It is
    whole and equal on every rank.
    """

    init: Init
    span: SourceLine | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Value):
    """Whole numbers of a layer that a job may change between two steps without compiling again (`%slots`).

    int64, whole and equal on every rank. Unlike a `State` it has no block that updates it, and is not saved.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Value):
    """A whole number that a job may change without compiling again, from `low` to `high`, initially `default`.

    In a graph it is a 0-d int64 tensor on CPU, equal on every rank: an int would need one graph per value.
    """

    default: int
    low: int
    high: int


TRAINING = Setting(name="training", shape=(), dtype="int64", default=1, low=0, high=1)
"""1 in training, 0 in evaluation."""

SEED = Setting(name="seed", shape=(), dtype="int64", default=0, low=0, high=MAX_SETTING)
"""The seed of random numbers."""

STEP = Setting(name="step", shape=(), dtype="int64", default=0, low=0, high=MAX_SETTING)
"""The number of the training step: each step draws other random numbers."""

SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in (TRAINING, SEED, STEP)}
"""Every setting, by name."""

Attribute = Any
"""The value of an op's attribute: int, float, bool, str or a tuple of them."""

"""The base of conversions between layouts, and the search for the conversion from one placement to another.

A conversion's class is its only declaration. `communicate` finds it by its placements, the torch operator and the
shuffle of the virtual cluster take their backward from it, and cost, fuse and the checks ask it for the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_type_hints

from moec.passes.ir.attribute_types import AxisName, DimNumber, Reduction
from moec.passes.ir.layout import Layout, Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, TokenOp, Type, layout_of, require
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Choices, Collective, Cost, Sent
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload

Kind = Literal["dense", "row counts", "rows"]
"""What a conversion carries: a value of one shape on every rank, counts of rows `[sources, experts]`, ragged rows."""

Unconverted = Literal["identity", "none"]
"""A gradient that passes unchanged, and a value that is not differentiated."""


UNITS: Mapping[Collective, int] = {"none": 0, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""What a rank sends in a collective of n ranks, in units of (n−1)/n of the value."""


def kind_of(value: Value) -> Kind:
    """The kind of `value`, which a conversion must carry to convert it."""
    if value.ragged is not None:
        return "rows"
    return "row counts" if value.is_row_counts else "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(TokenOp):
    """Changes the placement of its first operand on one mesh axis. The value, seen over all ranks, stays the same.

    `collectives` of forward and of backward say what a rank sends, in units of (n−1)/n of the value (whole on the axis;
    in an all-to-all, the rank's part): 1 for a ring all-gather, a ring reduce-scatter or an all-to-all, 2 for an
    all-reduce, which is a reduce-scatter and an all-gather.
    """

    takes: ClassVar[str] = "x"
    gives: ClassVar[str] = "y"
    moves: ClassVar[bool] = True
    resolved: ClassVar[Mapping[str, str]] = {"axis": "str group"}
    sited: ClassVar[bool] = True
    carries: ClassVar[frozenset[Kind]] = frozenset({"dense", "row counts"})
    """The values that it converts."""
    partial_gradient: ClassVar[bool] = False
    """Whether ops sharded on the axis consume the result: each rank's gradient of the result is a partial sum there."""
    collectives: ClassVar[tuple[Collective, Collective]] = ("none", "none")
    purpose: ClassVar[str] = "activations"
    """The heading under which its bytes are listed."""
    axis: AxisName

    @abstractmethod
    def source(self) -> Placement | None:
        """The placement that the first operand must have on the axis; None is replicated."""

    @abstractmethod
    def target(self) -> Placement | None:
        """The placement of the first result on the axis; None is replicated."""

    @abstractmethod
    def backward(self) -> Conversion | Unconverted:
        """The conversion of the gradient, made by `over`. Its other operands are those of this conversion."""

    @classmethod
    def over(cls, axis: str, **attributes: Any) -> Self:
        """The conversion over `axis` with these attributes, without operands and results."""
        return cls(operands=(), axis=axis, **attributes)

    @classmethod
    def operator_of(cls, **fixed: Any) -> str:
        """The name of the torch operator; `fixed` are attributes that the name contains (`reduce="max"`)."""
        return cls.over("", **fixed).torch_operator() if fixed else str(cls.operator)

    # ---- operands beside the value ---------------------------------------------------------------------

    def counts_conversion(self) -> Conversion | None:
        """Of ragged rows: the conversion of their counts over the same axis, made by `over`."""
        return None

    def restores_rows(self) -> bool:
        """Whether rows return to the ranks that they came from: the operand of `counts_conversion` counts them then."""
        return False

    def other_operands(self, counting: Op) -> tuple[str, ...]:
        """The operands after the first, given the op of the block that is `counts_conversion`."""
        return ()

    # ---- rules -----------------------------------------------------------------------------------------

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        self.require_kind(x)
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = self.require_source(operands[0])
        return Placing((layout, *map(layout_of, operands[1:])), (layout.replace(self.axis, self.target()),))

    def require_kind(self, value: Value) -> None:
        """Requires a value that the conversion carries."""
        require(kind_of(value) in self.carries, self, f"converts {' and '.join(sorted(self.carries))}")

    def require_source(self, value: Value) -> Layout:
        """The layout of `value`. Requires the placement `source()` on the axis, and no later cut of the same dim."""
        layout = layout_of(value)
        if layout.get(self.axis) != self.source() or not layout.can_undo(self.axis):
            raise LayoutError(f"{self.mnemonic} over {self.axis} of %{value.name}, which is {layout}")
        return layout

    # ---- cost ------------------------------------------------------------------------------------------

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the value, whole on the axis; in an all-to-all, bytes of the rank's part."""
        value = operands[0]
        return workload.bytes(replace(value, layout=layout_of(value).replace(self.axis, None)))

    def choices(self, operands: Sequence[Value], workload: Workload) -> Choices | None:
        """Where the rows of a token go, in an exchange of rows of tokens and experts."""
        return None

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        ranks = workload.meshes.size(self.axis)
        copied = elementwise(self, operands, results, workload).work.times(ranks > 1)
        part = self.volume(operands, results, workload) * (ranks - 1) / ranks
        ahead, back = self.collectives
        gradient = self.backward()
        sent = Sent(
            axis=self.axis,
            purpose=self.purpose,
            forward=UNITS[ahead] * part,
            backward=0 if operands[0].dtype == "int64" else UNITS[back] * part,
            collectives=self.collectives,
            backward_op=gradient.mnemonic if isinstance(gradient, Conversion) else gradient,
            choices=self.choices(operands, workload),
        )
        return Cost(work=copied, sent=(sent,), passes_gradient=gradient == "identity")


# ---- from one placement to another -----------------------------------------------------------------------


def conversion_classes() -> tuple[type[Conversion], ...]:
    """The classes of all registered conversions."""
    return tuple(op for op in Op.registry.values() if issubclass(op, Conversion))


def matching(
    carried: Kind, axis: str, source: Placement | None, target: Placement | None, *, partial_gradient: bool
) -> list[Conversion]:
    """The conversions of such a value from `source` to `target` on `axis`, made by `over`: one, or none.

    `partial_gradient`: whether ops sharded on the axis consume the result.
    """
    if source == target and not partial_gradient:
        return []
    classes = [c for c in conversion_classes() if carried in c.carries and c.partial_gradient == partial_gradient]
    candidates = (candidate for conversion in classes for candidate in _candidates(conversion, axis, source, target))
    return [candidate for candidate in candidates if (candidate.source(), candidate.target()) == (source, target)]


def _candidates(conversion: type[Conversion], axis: str, *placements: Placement | None) -> Iterator[Conversion]:
    """The conversion with every choice of attributes from the dims and reductions of `placements`."""
    values: Mapping[Any, list[Any]] = {
        DimNumber: list(dict.fromkeys(p.dim for p in placements if isinstance(p, Shard))),
        Reduction: list(dict.fromkeys(p.reduce for p in placements if isinstance(p, Partial))),
        bool: [False, True],
    }
    types = _attribute_types(conversion)
    for chosen in product(*(values[type_] for type_ in types.values())):
        yield conversion.over(axis, **dict(zip(types, chosen, strict=True)))


@cache
def _attribute_types(conversion: type[Conversion]) -> dict[str, Any]:
    """The types of the attributes beside the axis."""
    hints = get_type_hints(conversion, include_extras=True)
    return {name: hints[name] for name in conversion.attribute_names() if name != "axis"}

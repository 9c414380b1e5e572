"""communicate: inserts a conversion wherever a value's layout is not the one that its consumer needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moec.passes.ir import (
    Block,
    Layout,
    LayoutError,
    Meshes,
    Op,
    Parameter,
    Partial,
    Placement,
    Program,
    Shard,
    Value,
)
from moec.passes.ir.op import gradient_sums, layout_of
from moec.passes.ir.ops import (
    AllGather,
    AllGatherAlike,
    AllReduce,
    AllToAll,
    AllToAllPadded,
    Conversion,
    CopyTo,
    ExchangeCounts,
    ReduceScatter,
    Slice,
)


@dataclass(frozen=True, slots=True)
class Communicate:
    """One rule table, no special cases (`_Connector._insert`); every conversion is an op with a declared backward.

    The pass also sets the axes over which each parameter's gradient is summed (`gradient_sums`): the axes on which the
    parameter is replicated and the op's other operands or results are not.
    """

    def apply(self, program: Program) -> Program:
        """The Program with every operand in the layout that its op needs."""
        blocks = tuple(_connect(program, block) for block in program.blocks)
        return replace(program, blocks=blocks)


@dataclass(frozen=True, slots=True)
class Step:
    """One conversion: a value gets placement `target` on `axis`; `summed`: its gradient is a partial sum there."""

    axis: str
    target: Placement | None
    summed: bool


def steps_between(layout: Layout, wanted: Layout, summed: Iterable[str] = ()) -> Iterator[Step]:
    """The conversions, one axis at a time, that take a value from `layout` to `wanted`.

    A conversion can undo only the last cut of a dim, and a new cut becomes the last. Axes go to their final placement,
    in order of their names, as soon as one conversion suffices. Where later cuts block every remaining axis, one such
    cut is undone: its axis stays replicated until its final cut is possible.
    """
    summed = frozenset(summed)
    pending = {a for a in {*layout.axes, *wanted.axes} if not _is_placed(a, layout, wanted)} | summed
    while pending:
        axis = next((a for a in sorted(pending) if _can_be_placed(a, layout, wanted)), None)
        if axis is not None:
            step = Step(axis, wanted.get(axis), axis in summed)
            pending.remove(axis)
        else:
            in_the_way = (a for a in sorted(pending) if isinstance(layout.get(a), Shard) and layout.can_undo(a))
            # Sliced again later: until then the value is the same on every rank of the axis.
            step = Step(next(in_the_way), None, summed=False)
        yield step
        layout = layout.replace(step.axis, step.target)


def _is_placed(axis: str, layout: Layout, wanted: Layout) -> bool:
    """Whether `axis` has its final placement; for a cut, also its final position among the cuts of its dim."""
    placement = layout.get(axis)
    if not isinstance(placement, Shard) or placement != wanted.get(axis):
        return placement == wanted.get(axis)
    cuts = layout.cuts(placement.dim)
    upto = cuts.index(axis) + 1
    return cuts[:upto] == wanted.cuts(placement.dim)[:upto]


def _can_be_placed(axis: str, layout: Layout, wanted: Layout) -> bool:
    """Whether one conversion gives `axis` its final placement: its cut is the last, and the new cut is the next."""
    target = wanted.get(axis)
    if isinstance(target, Shard):
        cuts = wanted.cuts(target.dim)
        if layout.cuts(target.dim) != cuts[: cuts.index(axis)]:
            return False
    return layout.can_undo(axis)


def _connect(program: Program, block: Block) -> Block:
    connector = _Connector(block, program.meshes_of(block), program.block_map)
    for op in block.ops:
        connector.append(op)
    outputs = block.outputs
    if block.final:
        outputs = tuple(replace(output, name=connector.output(output.name)) for output in outputs)
    parameters = tuple(replace(p, sum_over=tuple(sorted(connector.sums.get(p.name, ())))) for p in block.parameters)
    return replace(block, ops=tuple(connector.ops), outputs=outputs, parameters=parameters)


@dataclass(slots=True)
class _Connector:
    """Rebuilds one block, conversion by conversion."""

    block: Block
    meshes: Meshes
    blocks: Mapping[str, Block]
    ops: list[Op] = field(default_factory=list)
    scope: dict[str, Value] = field(default_factory=dict)
    sums: dict[str, set[str]] = field(default_factory=dict)
    converted: dict[tuple[str, Step], str] = field(default_factory=dict)
    exchanges: dict[str, ExchangeCounts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scope.update(self.block.declared())

    def append(self, op: Op) -> None:
        """Appends `op` with its operands converted, and types and layouts of its results inferred again."""
        given = [self.scope[name] for name in op.operands]
        placing = op.place(given, self.meshes, self.blocks)
        sums = gradient_sums(op, given, placing)
        # Convert counts before their rows: the conversion of ragged rows needs the exchanged counts.
        names = list(op.operands)
        for i in sorted(range(len(given)), key=lambda i: given[i].ragged is not None):
            if isinstance(given[i], Parameter):
                # An all_gather of a parameter already sums its gradient: its backward is reduce_scatter.
                gathered = set(layout_of(given[i]).axes) - set(placing.operands[i].axes)
                self.sums.setdefault(given[i].name, set()).update(sums[i] - gathered)
            names[i] = self._convert(op.operands[i], placing.operands[i], sums[i], op)
        self.emit(replace(op, operands=tuple(names)))

    def emit(self, op: Op) -> None:
        """Appends `op` unchanged; its operands have the layouts that it needs."""
        operands = [self.scope[name] for name in op.operands]
        types = op.infer(operands, self.blocks)
        layouts = op.place(operands, self.meshes, self.blocks).results
        results = [
            replace(v, shape=t.shape, dtype=t.dtype, ragged=t.ragged, layout=layout)
            for v, t, layout in zip(op.results, types, layouts, strict=True)
        ]
        self.scope.update({v.name: v for v in results})
        self.ops.append(op.with_results(results))

    def output(self, name: str) -> str:
        """The name of the value `name` after its partial sums are reduced."""
        layout = layout_of(self.scope[name])
        whole = Layout.of((axis, p) for axis, p in layout.placements if not isinstance(p, Partial))
        return self._convert(name, whole, frozenset(), self.ops[-1])

    def _convert(self, name: str, wanted: Layout, summed: frozenset[str], consumer: Op) -> str:
        """The name of the value `name` in layout `wanted`. On the axes `summed` its gradient is a partial sum."""
        layout = layout_of(self.scope[name])
        if isinstance(self.scope[name], Parameter):
            summed = summed.intersection((*layout.axes, *wanted.axes))
        for step in steps_between(layout, wanted, summed):
            key = (name, step)
            if key not in self.converted:
                self.converted[key] = self._insert(name, step, consumer)
            name = self.converted[key]
        return name

    def _insert(self, name: str, step: Step, consumer: Op) -> str:
        """The rule table: one row per (from, to, whether the gradient is a partial sum) on one axis."""
        value, axis, target, summed = self.scope[name], step.axis, step.target, step.summed
        source = layout_of(value).get(axis)
        match source, target:
            case _ if value.ragged is not None and not (isinstance(source, Shard) and isinstance(target, Shard)):
                pass  # rows move by all_to_all alone
            case Partial(reduce=reduce), None:
                return self._move(value, consumer, AllReduce, axis=axis, reduce=reduce)
            case Partial(reduce="sum"), Shard(dim=dim):
                return self._move(value, consumer, ReduceScatter, axis=axis, dim=dim)
            case None, None if summed:
                return self._move(value, consumer, CopyTo, axis=axis)
            case None, Shard(dim=dim):
                return self._move(value, consumer, Slice, axis=axis, dim=dim)
            case Shard(dim=dim), None:
                return self._move(value, consumer, AllGather if summed else AllGatherAlike, axis=axis, dim=dim)
            case Shard(dim=0), Shard(dim=1) if value.is_row_counts:
                return self._exchange(value, axis, consumer)
            case (Shard(dim=1), Shard(dim=0)) | (Shard(dim=0), Shard(dim=1)) if value.ragged is not None:
                return self._all_to_all(value, axis, reverse=target == Shard(1), consumer=consumer)
            case Shard(dim=given), Shard(dim=other) if value.ragged is None:
                return self._move(value, consumer, AllToAllPadded, axis=axis, given=given, wanted=other)
        raise LayoutError(f"no conversion of %{name} from {axis}:{source} to {axis}:{target}")

    def _move(self, value: Value, consumer: Op, conversion: type[Conversion], **attributes: Any) -> str:
        given, like = value.name, value
        if isinstance(value, Parameter):
            given = f"@{value.name}"
            like = Value(name="_".join(value.name.split(".")[-2:]), shape=value.shape, dtype=value.dtype)
        moved = self._fresh(like)
        self.emit(conversion(operands=(given,), results=(moved,), span=consumer.span, **attributes))
        return moved.name

    def _exchange(self, counts: Value, axis: str, consumer: Op) -> str:
        received, splits = self._fresh(counts), self._fresh(replace(counts, name="splits"))
        op = ExchangeCounts(operands=(counts.name,), results=(received, splits), span=consumer.span, axis=axis)
        self.emit(op)
        self.exchanges[counts.name] = self.exchanges[received.name] = op
        return received.name

    def _all_to_all(self, rows: Value, axis: str, reverse: bool, consumer: Op) -> str:
        assert rows.ragged is not None
        if rows.ragged not in self.exchanges:
            raise LayoutError(f"the counts of %{rows.name}, %{rows.ragged}, were not exchanged over {axis}")
        exchange = self.exchanges[rows.ragged]
        received, splits = exchange.results
        moved = self._fresh(rows)
        counts = exchange.operands[0] if reverse else received.name
        operands = (rows.name, splits.name, counts)
        self.emit(AllToAll(operands=operands, results=(moved,), span=consumer.span, axis=axis, reverse=reverse))
        return moved.name

    def _fresh(self, like: Value) -> Value:
        stem = like.name.split(".")[0]
        name, number = stem, 0
        taken = {*self.scope, *self.block.scope}
        while name in taken:
            number += 1
            name = f"{stem}.{number}"
        return replace(like, name=name, role=None)

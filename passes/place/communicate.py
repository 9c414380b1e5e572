"""communicate: inserts a conversion wherever a value's layout is not the one that its consumer needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

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
from moec.passes.ir.mesh import joined, parts_of
from moec.passes.ir.op import gradient_sums, layout_of
from moec.passes.ir.ops.conversion import Conversion, kind_of, matching


@dataclass(frozen=True, slots=True)
class Communicate:
    """`matching` finds each conversion by its placements; this pass names none.

    The pass also sets the axes over which each parameter's gradient is summed (`gradient_sums`): the axes on which the
    parameter is replicated and the op's other operands or results are not.
    """

    def apply(self, program: Program) -> Program:
        """The Program with every operand in the layout that its op needs."""
        blocks = tuple(_connect(program, block) for block in program.blocks)
        return replace(program, blocks=blocks)


@dataclass(frozen=True, slots=True)
class AxisStep:
    """One conversion: a value gets placement `target` on `axis`; `summed`: its gradient is a partial sum there."""

    axis: str
    target: Placement | None
    summed: bool


def steps_between(layout: Layout, wanted: Layout, summed: Iterable[str] = ()) -> Iterator[AxisStep]:
    """The conversions, one axis at a time, that take a value from `layout` to `wanted`.

    On the axes `summed`, which `wanted` replicates, the gradient is a partial sum. A partial value is reduced there
    first: the gradient of a reduced value passes unchanged, so that its sum takes a step of its own.

    A conversion can undo only the last cut of a dim, and a new cut becomes the last. Axes go to their final placement,
    in order of their names, as soon as one conversion suffices. Where later cuts block every remaining axis, one such
    cut is undone: its axis stays replicated until its final cut is possible.
    """
    summed = frozenset(summed)
    pending = {a for a in {*layout.axes, *wanted.axes} if not _is_placed(a, layout, wanted)} | summed
    while pending:
        axis = next((a for a in sorted(pending) if _can_be_placed(a, layout, wanted)), None)
        if axis is not None:
            reduced = axis in summed and isinstance(layout.get(axis), Partial)
            step = AxisStep(axis, wanted.get(axis), axis in summed and not reduced)
            if not reduced:
                pending.remove(axis)
        else:
            in_the_way = (a for a in sorted(pending) if isinstance(layout.get(a), Shard) and layout.can_undo(a))
            # Sliced again later: until then the value is the same on every rank of the axis.
            step = AxisStep(next(in_the_way), None, summed=False)
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
    parameters = tuple(
        replace(p, sum_over=() if p.frozen else sums_of(p, connector.sums.get(p.name, set()), connector.meshes))
        for p in block.parameters
    )
    return replace(block, ops=tuple(connector.ops), outputs=outputs, parameters=parameters)


def sums_of(parameter: Parameter, axes: Set[str], meshes: Meshes) -> tuple[str, ...]:
    """The axes over which a gradient is summed: those of ZeRO's reduce_scatter, and the fewest for the others."""
    scattered = {axis for axis in parameter.gathered_over if axes >= set(parts_of(axis))}
    others = axes - {part for axis in scattered for part in parts_of(axis)}
    return tuple(sorted({*scattered, *joined(others, meshes.dense)}))


@dataclass(slots=True)
class _Connector:
    """Rebuilds one block, conversion by conversion."""

    block: Block
    meshes: Meshes
    blocks: Mapping[str, Block]
    ops: list[Op] = field(default_factory=list)
    scope: dict[str, Value] = field(default_factory=dict)
    sums: dict[str, set[str]] = field(default_factory=dict)
    converted: dict[tuple[str, AxisStep], str] = field(default_factory=dict)
    by_operand: dict[tuple[str, Conversion], Op] = field(default_factory=dict)
    by_result: dict[tuple[str, Conversion], Op] = field(default_factory=dict)
    """The op of each conversion, by the name of its operand or of its first result."""

    def __post_init__(self) -> None:
        self.scope.update(self.block.declared())

    def append(self, op: Op) -> None:
        """Appends `op` with its operands converted, and types and layouts of its results inferred again."""
        given = [self.scope[name] for name in op.operands]
        placing = op.place(given, self.meshes, self.blocks)
        sums, names = gradient_sums(op, given, placing), []
        for name, value, wanted, summed in zip(op.operands, given, placing.operands, sums, strict=True):
            if isinstance(value, Parameter):  # its own gradient is summed, after those of its conversions
                self.sums.setdefault(value.name, set()).update(summed)
                summed = frozenset[str]()
            names.append(self._convert(name, wanted, summed, op))
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
        for step in steps_between(layout_of(self.scope[name]), wanted, summed):
            name = self._take(name, step, consumer)
        return name

    def _take(self, name: str, step: AxisStep, consumer: Op) -> str:
        """The name of the value `name` after `step`. A value has each conversion once."""
        if (name, step) not in self.converted:
            self.converted[name, step] = self._insert(name, step, consumer)
        return self.converted[name, step]

    def _insert(self, name: str, step: AxisStep, consumer: Op) -> str:
        """Appends the conversion that takes `step`; gives the name of its first result."""
        value = self.scope[name]
        source = layout_of(value).get(step.axis)
        found = matching(kind_of(value), step.axis, source, step.target, partial_gradient=step.summed)
        if not found:
            raise LayoutError(f"no conversion of %{name} from {step.axis}:{source} to {step.axis}:{step.target}")
        (conversion,) = found
        operands = (name, *self._other_operands(conversion, value, consumer))
        results = [self._fresh(value), *(self._fresh(replace(value, name=n)) for n in conversion.gives.split()[1:])]
        op = replace(conversion, operands=operands, results=tuple(results), span=consumer.span)
        self.emit(op)
        self.by_operand[name, conversion] = self.by_result[results[0].name, conversion] = op
        return results[0].name

    def _other_operands(self, conversion: Conversion, value: Value, consumer: Op) -> tuple[str, ...]:
        """The operands that `conversion` takes beside `value`, from the conversion of the counts of ragged rows."""
        of_counts = conversion.counts_conversion()
        if of_counts is None:
            return ()
        assert value.ragged is not None
        if conversion.restores_rows():
            op = self.by_result.get((value.ragged, of_counts))
        else:
            self._take(value.ragged, AxisStep(of_counts.axis, of_counts.target(), of_counts.partial_gradient), consumer)
            op = self.by_operand.get((value.ragged, of_counts))
        if op is None:
            raise LayoutError(f"{conversion.mnemonic} of %{value.name}: %{value.ragged} is no {of_counts.mnemonic}")
        return conversion.other_operands(op)

    def _fresh(self, like: Value) -> Value:
        """A new value of the type of `like`, named after it: `rows.1` after `rows`, `down_bias` after the parameter."""
        stem = like.name.split(".")[0]
        if isinstance(like, Parameter):
            stem = "_".join(like.name.split(".")[-2:])
            like = Value(name=stem, shape=like.shape, dtype=like.dtype)
        name, number = stem, 0
        taken = {*self.scope, *self.block.scope}
        while name in taken:
            number += 1
            name = f"{stem}.{number}"
        return replace(like, name=name, role=None)

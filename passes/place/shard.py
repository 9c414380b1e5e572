"""shard: give every parameter and every value a layout on its mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.passes.ir import (
    REPLICATED,
    Block,
    Layout,
    LayoutError,
    Meshes,
    Parameter,
    Partial,
    Program,
    Shard,
    Value,
)
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.op import gradient_sums, layout_of
from moec.passes.ir.roles import ROLES
from moec.passes.ir.value import Dim
from moec.passes.place.shard_zero import cut_by_zero


@dataclass(frozen=True, slots=True)
class ShardLayouts:
    """Lays out tokens by `Program.tokens`, parameters by their declaration, and results by the rules of ops.

    `zero` is the stage of ZeRO, 0 to 3 (`shard_zero.py`). It cuts a parameter over the axes over which every use sums
    its gradient: kv heads that `tp` repeats are summed later, and stay whole.

    An operand's layout may still differ from the one that its op needs: `communicate` inserts conversions.
    """

    zero: int = 0

    def apply(self, program: Program) -> Program:
        """The Program with a layout on every value and parameter."""
        done = program
        for block in program.blocks:
            sharded = _shard_block(done, block, self.zero)
            blocks = tuple(sharded if b.name == block.name else b for b in done.blocks)
            done = replace(done, blocks=blocks)
        return done


def _shard_block(program: Program, block: Block, zero: int) -> Block:
    meshes, declared = program.meshes_of(block), block.parameters
    parameters = tuple(_shard_parameter(p, meshes) for p in block.parameters)
    inputs = tuple(replace(v, layout=_input_layout(program, v, meshes)) for v in block.inputs)
    settings = tuple(replace(s, layout=REPLICATED) for s in block.settings)
    states = tuple(replace(s, layout=REPLICATED) for s in block.states)
    block = replace(block, inputs=inputs, parameters=parameters, settings=settings, states=states)
    scope, ops = block.declared(), []
    summed: dict[str, frozenset[str]] = {}
    for op in block.ops:
        operands = [scope[name] for name in op.operands]
        placing = op.place(operands, meshes, program.block_map)
        for value, axes in zip(operands, gradient_sums(op, operands, placing), strict=True):
            if isinstance(value, Parameter):
                summed[value.name] = axes & summed.get(value.name, axes)
        results = [replace(v, layout=layout) for v, layout in zip(op.results, placing.results, strict=True)]
        scope.update({v.name: v for v in results})
        ops.append(op.with_results(results))
    cut = tuple(
        cut_by_zero(p, meshes, zero, summed.get(p.name, frozenset()), dict(before.shard).get("etp"))
        for before, p in zip(declared, parameters, strict=True)
    )
    return replace(block, ops=tuple(ops), parameters=cut)


def _shard_parameter(parameter: Parameter, meshes: Meshes) -> Parameter:
    cuts = {axis: dim for axis, dim in parameter.shard if _cuts(meshes.size(axis), parameter.shape[dim])}
    layout = Layout.of({axis: Shard(dim) for axis, dim in cuts.items()})
    return replace(parameter, shard=()).placed(layout)


def _cuts(ranks: int, size: Dim) -> bool:
    """Whether an axis cuts a dim. Ranks divide heads, hidden widths and experts (`degree_rules`). They may not divide a
    vocabulary, or kv heads fewer than the ranks: these stay whole.
    """
    assert isinstance(size, int)
    return ranks > 1 and size % ranks == 0


def _input_layout(program: Program, value: Value, meshes: Meshes) -> Layout:
    """The layout that the role of an input of a block asks for (`RoleSpec.lies`)."""
    lies = ROLES[value.role].lies if value.role is not None else None
    match lies:
        case "sharded over dp":
            return Layout.of({"dp": Shard(0)} if meshes.dense.size("dp") > 1 else {})
        case "replicated":
            return REPLICATED
        case "source by source":
            return Layout.of(dict.fromkeys(meshes.own_tokens.axes, Shard(0)))
        case "partial":
            return Layout.of(dict.fromkeys(meshes.own_tokens.axes, Partial()))
        case "as tokens":
            return meshes.tokens
        case "as given" if value.role and (given := program.block(FORWARD).output(value.role)) is not None:
            return layout_of(given)
    raise LayoutError(f"there is no rule for where %{value.name} lies, whose role is {value.role}")

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
from moec.passes.ir.mesh import EXPERT_AXES
from moec.passes.ir.op import layout_of
from moec.passes.ir.roles import ROLES
from moec.passes.ir.value import Dim


@dataclass(frozen=True, slots=True)
class ShardLayouts:
    """Lays out tokens by `Program.tokens`, parameters by their declaration, and results by the rules of ops.

    With `store_experts_over_edp` each replica of an expert stores a part of it, and `communicate` gathers the expert
    before its use (ZeRO-3 of Rajbhandari et al. 2020, section 5.3; Tutel's r = 0, Hwang et al. 2023, section 3.1).

    An operand's layout may still differ from the one that its op needs: `communicate` inserts conversions.
    """

    store_experts_over_edp: bool = False

    def apply(self, program: Program) -> Program:
        """The Program with a layout on every value and parameter."""
        done = program
        for block in program.blocks:
            sharded = _shard_block(done, block, self.store_experts_over_edp)
            blocks = tuple(sharded if b.name == block.name else b for b in done.blocks)
            done = replace(done, blocks=blocks)
        return done


def _shard_block(program: Program, block: Block, over_edp: bool) -> Block:
    meshes = program.meshes_of(block)
    parameters = tuple(_shard_parameter(p, meshes, over_edp) for p in block.parameters)
    inputs = tuple(replace(v, layout=_input_layout(program, v, meshes)) for v in block.inputs)
    settings = tuple(replace(s, layout=REPLICATED) for s in block.settings)
    states = tuple(replace(s, layout=REPLICATED) for s in block.states)
    block = replace(block, inputs=inputs, parameters=parameters, settings=settings, states=states)
    scope, ops = block.declared(), []
    for op in block.ops:
        operands = [scope[name] for name in op.operands]
        placing = op.place(operands, meshes, program.block_map)
        results = [replace(v, layout=layout) for v, layout in zip(op.results, placing.results, strict=True)]
        scope.update({v.name: v for v in results})
        ops.append(op.with_results(results))
    return replace(block, ops=tuple(ops))


def _shard_parameter(parameter: Parameter, meshes: Meshes, over_edp: bool) -> Parameter:
    cuts = {axis: dim for axis, dim in parameter.shard if _cuts(meshes.size(axis), parameter.shape[dim])}
    layout = Layout.of({axis: Shard(dim) for axis, dim in cuts.items()})
    if over_edp and any(axis in EXPERT_AXES for axis, _ in parameter.shard):
        layout = _stored(parameter, layout, meshes, "edp")
    return replace(parameter, shard=()).placed(layout)


def _cuts(ranks: int, size: Dim) -> bool:
    """Whether an axis cuts a dim. Ranks divide heads, hidden widths and experts (`degree_rules`). They may not divide a
    vocabulary, or kv heads fewer than the ranks: these stay whole.
    """
    assert isinstance(size, int)
    return ranks > 1 and size % ranks == 0


def _stored(parameter: Parameter, layout: Layout, meshes: Meshes, axis: str) -> Layout:
    """`layout` with a cut over `axis` of the first uncut dim that the axis divides, if there is one."""
    size, shape = meshes.size(axis), parameter.shape
    free = (dim for dim, n in enumerate(shape) if not layout.cuts(dim) and isinstance(n, int) and n % size == 0)
    dim = next(free, None) if size > 1 else None
    return layout if dim is None else layout.replace(axis, Shard(dim))


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

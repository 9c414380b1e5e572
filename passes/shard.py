"""shard: give every parameter and every value a layout on its mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.passes.ir import REPLICATED, Block, Layout, Mesh, Parameter, Partial, Program, Shard, Value


@dataclass(frozen=True, slots=True)
class ShardLayouts:
    """Tokens are sharded over the dense mesh's data axes, experts over `ep`; what follows, each op's rule says.

    An operand may still lie otherwise than its op wants it: that is what `communicate` mends.
    """

    def apply(self, program: Program) -> Program:
        """The Program with a layout on every value and parameter."""
        done = program
        for block in program.blocks:
            sharded = _shard_block(done, block)
            blocks = tuple(sharded if b.name == block.name else b for b in done.blocks)
            done = replace(done, blocks=blocks)
        return done


def _shard_block(program: Program, block: Block) -> Block:
    meshes = program.meshes_of(block)
    parameters = tuple(_shard_parameter(p, meshes.experts) for p in block.parameters)
    inputs = tuple(replace(v, layout=_input_layout(v, meshes.dense)) for v in block.inputs)
    scope: dict[str, Value] = {v.name: v for v in inputs} | {f"@{p.name}": p for p in parameters}
    ops = []
    for op in block.ops:
        operands = [scope[name] for name in op.operands]
        placing = op.place(operands, meshes, program.block_map)
        results = [replace(v, layout=layout) for v, layout in zip(op.results, placing.results, strict=True)]
        scope.update({v.name: v for v in results})
        ops.append(op.with_results(results))
    return replace(block, inputs=inputs, parameters=parameters, ops=tuple(ops))


def _shard_parameter(parameter: Parameter, experts: Mesh | None) -> Parameter:
    if experts is not None and parameter.name.startswith("moe.experts."):
        layout = Layout.of({"ep": Shard(0)}) if experts.size("ep") > 1 else REPLICATED
        return replace(parameter, layout=layout)
    return replace(parameter, layout=REPLICATED)


def _input_layout(value: Value, dense: Mesh) -> Layout:
    if dense.size("dp") == 1:
        return REPLICATED
    if value.shape:
        return Layout.of({"dp": Shard(0)})
    return Layout.of({"dp": Partial()})

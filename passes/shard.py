"""shard: give every parameter and every value a layout on its mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.passes.ir import REPLICATED, Block, Layout, Mesh, Meshes, Parameter, Partial, Program, Shard, Value
from moec.passes.ir.op import layout_of


@dataclass(frozen=True, slots=True)
class ShardLayouts:
    """Tokens lie as `Program.tokens` says, experts over `ep`, weights of the other parts over `tp`.

    As Megatron-LM shards them (Shoeybi et al. 2019, section 3). What follows, each op's rule says.

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
    parameters = tuple(_shard_parameter(p, meshes) for p in block.parameters)
    inputs = tuple(replace(v, layout=_input_layout(program, v, meshes)) for v in block.inputs)
    settings = tuple(replace(s, layout=REPLICATED) for s in block.settings)
    block = replace(block, inputs=inputs, parameters=parameters, settings=settings)
    scope, ops = block.declared(), []
    for op in block.ops:
        operands = [scope[name] for name in op.operands]
        placing = op.place(operands, meshes, program.block_map)
        results = [replace(v, layout=layout) for v, layout in zip(op.results, placing.results, strict=True)]
        scope.update({v.name: v for v in results})
        ops.append(op.with_results(results))
    return replace(block, ops=tuple(ops))


TENSOR_PARALLEL = {
    "embedding.weight": 0, "head.weight": 0,
    "attention.q.weight": 0, "attention.k.weight": 0, "attention.v.weight": 0, "attention.o.weight": 1,
    "attention.q.bias": 0, "attention.k.bias": 0, "attention.v.bias": 0,
    "ffn.up.weight": 1, "ffn.up.bias": 1, "ffn.down.weight": 1,
    "moe.shared.up.weight": 1, "moe.shared.up.bias": 1, "moe.shared.down.weight": 1,
    "moe.residual.up.weight": 1, "moe.residual.up.bias": 1, "moe.residual.down.weight": 1,
}  # fmt: skip
"""Which dim of a parameter `tp` shards: heads, hidden widths, the vocabulary. All others are whole on each rank."""


def _shard_parameter(parameter: Parameter, meshes: Meshes) -> Parameter:
    if meshes.experts is not None and parameter.name.startswith("moe.experts."):
        return replace(parameter, layout=_over("ep", 0, meshes.experts))
    dim = TENSOR_PARALLEL.get(parameter.name)
    if dim is None:
        return replace(parameter, layout=REPLICATED)
    size, tp = parameter.shape[dim], meshes.dense.size("tp")
    assert isinstance(size, int)
    # Heads and hidden widths divide (`degrees`); kv heads fewer than tp, and any vocabulary, may not.
    return replace(parameter, layout=REPLICATED if size % tp else _over("tp", dim, meshes.dense))


def _over(axis: str, dim: int, mesh: Mesh) -> Layout:
    return Layout.of({axis: Shard(dim)}) if mesh.size(axis) > 1 else REPLICATED


def _input_layout(program: Program, value: Value, meshes: Meshes) -> Layout:
    """Ids and labels come whole to the ranks of a tp group; balance terms are sums over a rank's own tokens.

    A count is that of all ranks.
    """
    if not value.shape and value.dtype == "int64":
        return REPLICATED
    if not value.shape:
        return Layout.of(dict.fromkeys(meshes.own_tokens.axes, Partial()))
    if value.dtype == "int64":
        return _over("dp", 0, meshes.dense)
    if value.name == "logits":  # the loss takes them as `forward` leaves them
        return layout_of(program.block("forward").scope["logits"])
    return meshes.tokens

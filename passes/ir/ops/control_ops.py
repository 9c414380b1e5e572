"""The op that runs a layer's block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import BlockName, LayerNumber
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("call", "inputs* -> *", moves=True)
class Call(TokenOp):
    """Runs a block with the parameters of layer `layer`: identical layers share one body."""

    block: BlockName
    layer: LayerNumber

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        callee = blocks[self.block]
        types = [(v.shape, v.dtype) for v in operands]
        require(types == [(v.shape, v.dtype) for v in callee.inputs], self, "operands are not the block's inputs")
        return tuple(Type(shape=v.shape, dtype=v.dtype) for v in callee.output_values())

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        callee = blocks[self.block]
        return Placing(tuple(layout_of(v) for v in callee.inputs), tuple(layout_of(v) for v in callee.output_values()))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return Cost()  # counted by the block's ops

"""Program → graphs as data. What each op becomes is in `lowerings.py`. Needs no torch."""

from __future__ import annotations

from moec.codegen.emitter import BlockEmitter
from moec.codegen.graph import Graph, StageGraphs
from moec.codegen.lowerings import LOWERINGS
from moec.passes.ir import Block, Program


def emit(program: Program) -> tuple[StageGraphs, ...]:
    """The graphs of every stage. A Program that was only lowered is one stage."""
    if not program.stages:
        return (StageGraphs(index=0, graphs=_emit_blocks(program, program.blocks)),)
    return tuple(
        StageGraphs(index=stage.index, graphs=_emit_blocks(program, tuple(map(program.block, stage.blocks))))
        for stage in program.stages
    )


def _emit_blocks(program: Program, blocks: tuple[Block, ...]) -> tuple[Graph, ...]:
    graphs: list[Graph] = []
    for block in blocks:
        emitter = BlockEmitter(program, block)
        for op in block.ops:
            LOWERINGS[type(op)](emitter, op)
        graphs += emitter.graphs()
    return tuple(graphs)

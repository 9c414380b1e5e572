"""The verifier: a Program that a pass broke does not get through."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.plans import BODY, moe_spec
from support.tables import each_row

from moec.grammar.diagnostics import InternalError
from moec.passes.ir import REPLICATED, Block, Layout, Mesh, Op, Output, Program, Shard
from moec.passes.ir.verifier import connected, laid_out, placed, staged, well_typed
from moec.passes.pipeline import compile_program


@pytest.fixture(scope="module")
def program() -> Program:
    return compile_program(moe_spec()).program


def with_block(program: Program, change: Callable[[Block], Block]) -> Program:
    return replace(program, blocks=tuple(change(b) if b.name == BODY else b for b in program.blocks))


def with_op(program: Program, mnemonic: str, change: Callable[[Op], Op]) -> Program:
    def in_block(block: Block) -> Block:
        return replace(block, ops=tuple(change(op) if op.mnemonic == mnemonic else op for op in block.ops))

    return with_block(program, in_block)


def retyped(op: Op) -> Op:
    return op.with_results([replace(v, dtype="fp16") for v in op.results])


def relaid(op: Op) -> Op:
    return op.with_results([replace(v, layout=Layout.of({"dp": Shard(1)})) for v in op.results])


def without_collective(program: Program) -> Program:
    """The rows go to the experts without the all-to-all."""
    moved = next(op for op in program.block(BODY).ops if op.mnemonic == "all_to_all")
    source, target = moved.operands[0], moved.results[0].name
    mended = with_op(
        program, "expert_mlp", lambda op: replace(op, operands=tuple(source if n == target else n for n in op.operands))
    )
    return with_block(mended, lambda b: replace(b, ops=tuple(op for op in b.ops if op is not moved)))


BROKEN = {
    "a result of another dtype": (well_typed, lambda p: with_op(p, "sum_rows", retyped), "sum_rows"),
    "a use before the definition": (
        well_typed,
        lambda p: with_block(p, lambda b: replace(b, ops=b.ops[::-1])),
        "before it is defined",
    ),
    "an output that nothing defines": (
        well_typed,
        lambda p: with_block(p, lambda b: replace(b, outputs=(Output("nothing", "residual"),))),
        "nothing defines",
    ),
    "two definitions": (
        well_typed,
        lambda p: with_block(p, lambda b: replace(b, ops=(b.ops[0], *b.ops))),
        "redefines",
    ),
    "rows counted by another value": (well_typed, without_collective, "counted by"),
    "a result that lies elsewhere": (connected, lambda p: with_op(p, "sum_rows", relaid), "mixed"),
    "a value without a layout": (
        laid_out,
        lambda p: with_op(p, "route", lambda op: op.with_results([replace(v, layout=None) for v in op.results])),
        "no layout",
    ),
    "a layout over an axis there is not": (
        laid_out,
        lambda p: with_op(
            p, "route", lambda op: op.with_results([replace(v, layout=Layout.of({"tp": Shard(0)})) for v in op.results])
        ),
        "axes are",
    ),
    "a parameter without a gradient rule": (
        connected,
        lambda p: with_block(
            p, lambda b: replace(b, parameters=tuple(replace(q, sum_over=None) for q in b.parameters))
        ),
        "gradient rule",
    ),
    "experts that are not sharded": (
        connected,
        lambda p: with_block(p, lambda b: replace(b, parameters=tuple(q.placed(REPLICATED) for q in b.parameters))),
        "rows",
    ),
    "meshes of different sizes": (
        placed,
        lambda p: replace(p, meshes=(*p.meshes, Mesh("experts[9]", (("edp", 3),)))),
        "different rank counts",
    ),
    "a stage of no block": (staged, lambda p: replace(p, stages=(replace(p.stages[0], forward="x"),)), "no block"),
}


def test_a_layout_over_an_axis_of_another_blocks_mesh_is_refused():
    program = compile_program(moe_spec(ranks=4, mixtures=((8, 4), (8, 1)))).program
    laid_out(program)
    other = {"layers[1]": "edp", "layers[2]": "ep"}
    for name, axis in other.items():
        block = program.block(name)
        moved = replace(block, parameters=tuple(p.placed(Layout.of({axis: Shard(0)})) for p in block.parameters))
        blocks = tuple(moved if b is block else b for b in program.blocks)
        with pytest.raises(InternalError, match="axes are"):
            laid_out(replace(program, blocks=blocks))


@each_row("fault", BROKEN)
def test_a_broken_program_is_refused(program: Program, fault: str):
    invariant, break_it, words = BROKEN[fault]
    invariant(program)
    with pytest.raises(InternalError, match=words):
        invariant(break_it(program))

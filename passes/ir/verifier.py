"""What must hold of a Program, and from which pass on. A failure is a bug in a pass, never a user's mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moec.grammar.diagnostics import InternalError
from moec.passes.ir.op import LayoutError, Op, TypeRuleError, gradient_sums
from moec.passes.ir.ops import AllGather, Call, CopyTo
from moec.passes.ir.program import Block, Program
from moec.passes.ir.value import Parameter

Invariant = Callable[[Program], None]


def well_typed(program: Program) -> None:
    """Names are defined once and before use, and every result has the type that its op's rule gives."""
    for block in program.blocks:
        defined = {v.name for v in block.inputs} | {f"@{p.name}" for p in block.parameters}
        _check(len(defined) == len(block.inputs) + len(block.parameters), block, "an input or parameter twice")
        for op in block.ops:
            for name in op.operands:
                _check(name in defined, block, f"{op.mnemonic} uses {name} before it is defined")
            results = [v.name for v in op.results]
            _check(not defined.intersection(results), block, f"{op.mnemonic} redefines one of {results}")
            defined.update(results)
            try:
                types = op.infer(block.operands(op), program.block_map)
            except TypeRuleError as error:
                raise InternalError(f"in {block.name}: {error}") from error
            _check(len(types) == len(op.results), block, f"{op.mnemonic} gives {len(types)} results")
            for value, type_ in zip(op.results, types, strict=True):
                same = (value.shape, value.dtype, value.ragged) == (type_.shape, type_.dtype, type_.ragged)
                _check(same, block, f"{op.mnemonic}: %{value.name} is {value}, the rule says {type_}")
        for name in block.outputs:
            _check(name in defined, block, f"gives {name}, which nothing defines")


def placed(program: Program) -> None:
    """The meshes factor the same ranks, and every block that needs an expert mesh names one."""
    _check_program(bool(program.meshes), "there is no mesh")
    _check_program(len({mesh.ranks for mesh in program.meshes}) == 1, "the meshes factor different rank counts")
    names = {mesh.name for mesh in program.meshes}
    for block in program.blocks:
        _check(block.experts is None or block.experts in names, block, f"there is no mesh {block.experts}")


def laid_out(program: Program) -> None:
    """Every value and parameter has a layout, over axes of its block's meshes that have more than one rank."""
    for block in program.blocks:
        axes = _wide_axes(program, block)
        for name, value in block.scope.items():
            _check(value.layout is not None, block, f"{name} has no layout")
            if value.layout is not None:
                _check(axes.issuperset(value.layout.axes), block, f"{name} lies on {value.layout}, axes are {axes}")


def _wide_axes(program: Program, block: Block) -> set[str]:
    """The wide axes of a block's meshes, and of the blocks that it calls: it holds what they give."""
    called = {op.block for op in block.ops if isinstance(op, Call)} - {block.name}
    names = {"dense", block.experts, *(program.block(name).experts for name in called)} - {None}
    return {axis for mesh in program.meshes if mesh.name in names for axis in mesh.wide_axes()}


def connected(program: Program) -> None:
    """Every operand lies as its op wants it, every result as the rule gives it.

    Every gradient that is a partial sum is summed: that of a parameter by the plan, that of a value by the conversion
    that gave it.
    """
    for block in program.blocks:
        for parameter in block.parameters:
            _check(parameter.sum_over is not None, block, f"@{parameter.name}: no gradient rule")
        given = {v.name: op for op in block.ops for v in op.results}
        for op in block.ops:
            operands = block.operands(op)
            try:
                placing = op.place(operands, program.meshes_of(block), program.block_map)
            except LayoutError as error:
                raise InternalError(f"in {block.name}: {error}") from error
            for value, layout in zip(operands, placing.operands, strict=True):
                _check(value.layout == layout, block, f"{op.mnemonic}: {value.name} is {value.layout}, not {layout}")
            for value, layout in zip(op.results, placing.results, strict=True):
                _check(value.layout == layout, block, f"{op.mnemonic}: {value.name} is {value.layout}, not {layout}")
            for name, sums in zip(op.operands, gradient_sums(op, operands, placing), strict=True):
                value = block.scope[name]
                if not op.moves:
                    summed = set(value.sum_over or ()) if isinstance(value, Parameter) else _summed(name, given)
                    complaint = f"{op.mnemonic}: the gradient of {name} is summed over {summed}, not {set(sums)}"
                    _check(sums == summed, block, complaint)


def _summed(name: str, given: Mapping[str, Op]) -> set[str]:
    """The axes over which the conversions that gave a value sum its gradient."""
    axes: set[str] = set()
    while isinstance(op := given.get(name), CopyTo | AllGather):
        axes.add(op.axis)
        (name,) = op.operands
    return axes


def staged(program: Program) -> None:
    """Every block belongs to at least one stage."""
    held = {name for stage in program.stages for name in stage.blocks}
    _check_program(held == set(program.block_map), f"the stages hold {sorted(held)}")


def _check(condition: bool, block: Block, complaint: str) -> None:
    if not condition:
        raise InternalError(f"in {block.name}: {complaint}")


def _check_program(condition: bool, complaint: str) -> None:
    if not condition:
        raise InternalError(complaint)

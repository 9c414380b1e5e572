"""The invariants of a Program. A failure is a bug in a pass, or a file that no pass wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from moec.grammar.diagnostics import InternalError
from moec.passes.ir.interface import has_interface
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Shard
from moec.passes.ir.mesh import DENSE_AXES, EXPERT_AXES, Mesh, parts_of
from moec.passes.ir.op import TOKEN_DIM_OF, LayoutError, Op, TypeRuleError, gradient_sums
from moec.passes.ir.ops import Call, Conversion
from moec.passes.ir.order_rules import scheduled
from moec.passes.ir.parameter_rules import guests_complaint, parameter_complaint, uneven
from moec.passes.ir.program import Block, Program
from moec.passes.ir.value import Parameter, Value

Invariant = Callable[[Program], None]


def check_program(program: Program) -> None:
    """Checks every invariant of a finished Program, for a Program read from a file.

    Raises `InternalError` that names the block, the op and its line.
    """
    block_invariants = (well_typed, called_once, placed, laid_out, evenly_cut, connected)
    for invariant in (*block_invariants, staged, has_interface, scheduled):
        invariant(program)


def well_typed(program: Program) -> None:
    """Names are defined once and before use, and every result has the type that its op's rule gives."""
    for block in program.blocks:
        defined = set(block.declared())
        declared = (*block.inputs, *block.tables, *block.parameters, *block.settings, *block.states)
        _check(len(defined) == len(declared), block, "an input, parameter, setting or state twice")
        for op in block.ops:
            _names_defined(block, op, defined)
            try:
                op.named(op.operands)
                types = op.infer(block.operands(op), program.block_map)
            except RULE_ERRORS as error:
                raise _unfit(block, op, error) from error
            _check(len(types) == len(op.results), block, f"{op.mnemonic} gives {len(types)} results")
            for value, type_ in zip(op.results, types, strict=True):
                if (value.shape, value.dtype, value.ragged) != (type_.shape, type_.dtype, type_.ragged):
                    raise _failure(block, f"%{value.name} is {value}, the rule says {type_}", op)
                if value.role is not None:
                    raise _failure(block, f"%{value.name} has the role of an input, {value.role}", op)
        for output in block.outputs:
            _check(output.name in defined, block, f"gives {output.name}, which nothing defines")


def _names_defined(block: Block, op: Op, defined: set[str]) -> None:
    """Checks the names that `op` uses and adds those that it defines."""
    for name in op.operands:
        if name not in defined:
            raise _failure(block, f"{name} is used before it is defined", op)
    for value in op.results:
        if value.name in defined:
            raise _failure(block, f"redefines {value.name}", op)
        defined.add(value.name)


def called_once(program: Program) -> None:
    """No two calls run a block with the parameters of one layer."""
    layers: set[int] = set()
    for block in program.blocks:
        for op in block.ops:
            if isinstance(op, Call):
                if op.layer in layers:
                    raise _failure(block, f"layer {op.layer} runs twice", op)
                layers.add(op.layer)


def placed(program: Program) -> None:
    """The meshes factor the same ranks, and every block that needs an expert mesh names one."""
    _check_program(bool(program.meshes), "there is no mesh")
    _check_program(len({mesh.ranks for mesh in program.meshes}) == 1, "the meshes factor different rank counts")
    names = {mesh.name for mesh in program.meshes}
    _check_program(
        "dense" in names and len(names) == len(program.meshes), "two meshes have one name, or no mesh is called dense"
    )
    for mesh in program.meshes:
        axes = tuple(axis for axis, _ in mesh.axes)
        in_order = tuple(axis for axis in (DENSE_AXES if mesh.name == "dense" else EXPERT_AXES) if axis in axes)
        _check_program(axes == in_order, f"the mesh {mesh.name} has the axes {', '.join(axes)}")
    for axis, placement in program.tokens.placements:
        is_cut = placement == Shard(TOKEN_DIM_OF.get(axis, -1)) and program.mesh("dense").size(axis) > 1
        _check_program(is_cut, f"the residual stream cannot have {axis}:{placement}")
    for block in program.blocks:
        _check(block.experts is None or block.experts in names, block, f"there is no mesh {block.experts}")


def laid_out(program: Program) -> None:
    """Every value and parameter has a layout, over axes of its block's meshes that have more than one rank."""
    for block in program.blocks:
        axes = wide_axes(program, block)
        for name, value in block.scope.items():
            if value.layout is None:
                raise _failure(block, f"{name} has no layout")
            if not axes.keys() >= set(value.layout.axes):
                raise _failure(block, f"{name} lies on {value.layout}, axes are {set(axes)}")
        for parameter in block.parameters:
            _check(not parameter.shard, block, f"@{parameter.name} has a layout, and says how to shard it")
            axes_summed = parameter.sum_over or ()
            if not axes.keys() >= set(axes_summed) or len(set(axes_summed)) < len(axes_summed):
                raise _failure(block, f"@{parameter.name} is summed over {axes_summed}, axes are {set(axes)}")
        for state in block.states:
            _check(state.layout == REPLICATED, block, f"^{state.name} is {state.layout}, and states are whole")
        for table in block.tables:
            _check(table.layout == REPLICATED, block, f"%{table.name} is {table.layout}, and tables are whole")
        for op in block.ops:
            if isinstance(op, Conversion) and op.axis not in axes:
                raise _failure(block, f"there is no axis {op.axis}, axes are {set(axes)}", op)


def wide_axes(program: Program, block: Block) -> dict[str, int]:
    """The wide axes, with sizes, of a block's meshes and of the meshes of the blocks that it calls.

    An axis of several expert meshes gets the greatest common divisor of their sizes.
    """
    called = {op.block for op in block.ops if isinstance(op, Call)} - {block.name}
    names = {"dense", block.experts, *(program.block(name).experts for name in called)} - {None}
    axes: dict[str, int] = {}
    for mesh in (program.mesh_map[name] for name in sorted(filter(None, names)) if name in program.mesh_map):
        for axis, size in _sizes(mesh):
            axes[axis] = math.gcd(axes.get(axis, 0), size)
    return axes


@lru_cache(maxsize=64)
def _sizes(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    return tuple((axis, mesh.size(axis)) for axis in (*mesh.wide_axes(), *mesh.joint_axes()))


def evenly_cut(program: Program) -> None:
    """Layouts cut existing dims into equal pieces; inputs and parameters are no partial sums.

    Allowed as partial sums are a scalar input of a `final` block, and the inputs `balance` and `choice_counts` of a
    stage. Values with a dim `sources` are exempt from equal pieces: each rank has a different value, as the layout
    says.
    """
    for block in program.blocks:
        axes = wide_axes(program, block)
        cut: dict[tuple[object, ...], str] = {}
        for name, value in block.scope.items():
            if value.layout is None or not value.layout.placements:
                continue
            key = (value.shape, value.layout)
            if key not in cut:
                cut[key] = uneven(value, value.layout, axes)
            if cut[key]:
                raise _failure(block, f"{name} is {value.layout}: {cut[key]}")
        for value in (*block.inputs, *block.parameters):
            partial = any(isinstance(p, Partial) for _, p in value.layout.placements) if value.layout else False
            is_scalar_input = not value.shape and not isinstance(value, Parameter)
            allowed = (is_scalar_input and block.final) or value.role in ("balance", "choice_counts")
            _check(not partial or allowed, block, f"{value.name} is given as a partial sum")


def connected(program: Program) -> None:
    """Every operand has the layout that its op needs, every result the layout that the op's rule gives.

    Every gradient that is a partial sum is summed: a parameter's over `sum_over`, a value's by the conversion that
    made the value.
    """
    for block in program.blocks:
        used, axes = {name for op in block.ops for name in op.operands}, wide_axes(program, block)
        for parameter in block.parameters:
            _check(parameter.sum_over is not None, block, f"@{parameter.name}: no gradient rule")
            _check(f"@{parameter.name}" in used, block, f"no op uses @{parameter.name}")
            complaint = parameter_complaint(parameter, tuple(axes.items()))
            complaint = complaint or guests_complaint(parameter, block.tables, axes.get("ep", 1))
            _check(not complaint, block, complaint)
        meshes = program.meshes_of(block)
        summed = {
            f"@{p.name}": frozenset(part for axis in p.sum_over or () for part in parts_of(axis) if part in axes)
            for p in block.parameters
        }
        for op in block.ops:
            operands = block.operands(op)
            try:
                placing = op.place(operands, meshes, program.block_map)
                sums = gradient_sums(op, operands, placing)
            except RULE_ERRORS as error:
                raise _unfit(block, op, error) from error
            _lie_as(block, op, operands, placing.operands)
            _lie_as(block, op, op.results, placing.results)
            for name, axes_summed in zip(op.operands, sums, strict=True):
                if not op.moves and name not in block.frozen and axes_summed != summed.get(name, _NOTHING):
                    stated = set(summed.get(name, _NOTHING))
                    raise _failure(block, f"the gradient of {name} is summed over {stated}, not {set(axes_summed)}", op)
            if isinstance(op, Conversion):
                summed_before = summed.get(op.operands[0], _NOTHING)
                new_axes = {op.axis} if op.partial_gradient else _NOTHING
                if summed_before & new_axes:
                    raise _failure(block, f"the gradient of {op.operands[0]} is summed over {op.axis} twice", op)
                summed[op.results[0].name] = summed_before | new_axes


_NOTHING: frozenset[str] = frozenset()


def _lie_as(block: Block, op: Op, values: Sequence[Value], layouts: Sequence[Layout]) -> None:
    if len(values) != len(layouts):
        raise _failure(block, f"the rule says {len(layouts)} layouts for {len(values)} values", op)
    for value, layout in zip(values, layouts, strict=True):
        if value.layout != layout:
            raise _failure(block, f"{value.name} is {value.layout}, not {layout}", op)


def staged(program: Program) -> None:
    """Stages have consecutive ranks, as many as the meshes, and each its own block `forward`. All ranks have equally
    many stages.

    A parameter of several blocks `forward` is the same parameter, with equal layouts: each stage has a copy of it, and
    they sum their gradients at the end of a step.
    """
    ranks, next_rank = program.mesh("dense").ranks, 0
    for number, stage in enumerate(program.stages):
        fits = (stage.index, stage.num_ranks, stage.first_rank % ranks) == (number, ranks, 0)
        _check_program(
            fits and stage.first_rank <= next_rank, f"stage {stage.index} has not the {ranks} ranks from {next_rank} on"
        )
        next_rank = max(next_rank, stage.first_rank + ranks)
        _check_program(
            stage.forward in program.block_map, f"stage {stage.index} runs {stage.forward}, which is no block"
        )
    names = [stage.forward for stage in program.stages]
    _check_program(bool(names) and len(set(names)) == len(names), f"the stages run {names}")
    _check_program(program.has_equal_stages, "ranks have different numbers of stages")
    first_of = {p.name: p for name in reversed(names) for p in program.block(name).parameters}
    for parameter in (p for name in names for p in program.block(name).parameters):
        _check_program(parameter == first_of[parameter.name], f"stages have different parameters {parameter.name}")


RULE_ERRORS = (TypeRuleError, LayoutError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
"""What a rule of an op raises. Rules unpack and index operands without checks: these say that operands do not fit."""


def _unfit(block: Block, op: Op, error: Exception) -> InternalError:
    if isinstance(error, TypeRuleError | LayoutError):
        return _failure(block, str(error), op)
    return _failure(block, f"{len(op.operands)} operands do not fit ({error})", op)


def _failure(block: Block, complaint: str, op: Op | None = None) -> InternalError:
    if op is None:
        return InternalError(f"in {block.name}: {complaint}")
    line = f" ({op.span})" if op.span else ""
    results = ", ".join(f"%{value.name}" for value in op.results[:3])
    return InternalError(f"in {block.name}: {results} = {op.mnemonic}{line}: {complaint}")


def _check(condition: bool, block: Block, complaint: str) -> None:
    if not condition:
        raise _failure(block, complaint)


def _check_program(condition: bool, complaint: str) -> None:
    if not condition:
        raise InternalError(complaint)

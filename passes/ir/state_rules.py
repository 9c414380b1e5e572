"""The rules of states: which block reads a state, and which block gives it a new value."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from moec.grammar.diagnostics import InternalError
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.ops import Call
from moec.passes.ir.program import Block, Program
from moec.passes.ir.value import Value


def update_blocks(program: Program) -> tuple[str, ...]:
    """The blocks that give states their new values, in the order of the layers' blocks that name them."""
    return tuple(dict.fromkeys(block.update for block in program.blocks if block.update is not None))


def require_updates(program: Program, layers: Collection[str]) -> None:
    """Requires that each state is read by a layer's block and has one block that updates it. Raises `InternalError`.

    `layers` are the names of the layers' blocks. A block that updates states takes the `counts` of one layer and has
    the layer's states; it gives each of them one new value, of the same type, equal on every rank.
    """
    updates = update_blocks(program)
    for block in program.blocks:
        for complaint in _block_complaints(program, block, layers, updates):
            raise InternalError(f"in {block.name}: {complaint}")


def _block_complaints(
    program: Program, block: Block, layers: Collection[str], updates: Collection[str]
) -> Iterator[str]:
    operands = {name for op in block.ops for name in op.operands}
    stored = {parameter.name for parameter in block.parameters} | {state.name for state in block.states}
    if len(stored) < len(block.parameters) + len(block.states):
        yield "a state has the name of a parameter"
    for name in sorted(stored if block.states else ()):
        parts = name.split(".")
        prefixes = (".".join(parts[:n]) for n in range(1, len(parts)))
        if (prefix := next(filter(stored.__contains__, prefixes), None)) is not None:
            yield f"{prefix} is a prefix of another name"
    for state in block.states:
        if f"^{state.name}" not in operands:
            yield f"no op reads ^{state.name}"
    if block.name in updates:
        yield from _update_complaints(block, block.name in layers)
    elif block.states and block.name not in layers:
        yield f"^{block.states[0].name} is a state of no layer"
    elif block.states and block.update is None:
        yield f"no block updates ^{block.states[0].name}"
    if block.update is not None:
        yield from _layer_complaints(program, block)


def _update_complaints(update: Block, is_layer: bool) -> Iterator[str]:
    """The faults of a block that updates states."""
    if is_layer or update.update is not None:
        yield f"{update.name} is also a layer" if is_layer else f"{update.name} has a block that updates it"
    if [value.role for value in update.inputs] != ["counts"]:
        yield f"{update.name} takes other inputs than `counts`"
    if update.parameters or update.settings or update.experts or any(isinstance(op, Call) for op in update.ops):
        yield f"{update.name} has parameters, settings, experts or layers"
    states = {state.name: state for state in update.states}
    if sorted(states) != sorted(output.state or "" for output in update.outputs):
        yield f"{update.name} gives other outputs than its states"
    if not update.final:
        yield f"{update.name} is not final"
    for output, value in zip(update.outputs, update.output_values(), strict=True):
        state = states.get(output.state or "")
        if state is None or output.role != "state" or (value.shape, value.dtype) != (state.shape, state.dtype):
            yield f"%{output.name} is no new value of ^{output.state}"
        elif value.layout != REPLICATED or output.name.startswith("^"):
            yield f"%{output.name} is not computed alike on every rank"


def _layer_complaints(program: Program, block: Block) -> Iterator[str]:
    """The faults between a layer's block and the block that updates its states."""
    update = program.block_map.get(block.update or "")
    if update is None:
        yield f"there is no block {block.update}"
    elif not block.states or {s.name: s for s in block.states} != {s.name: s for s in update.states}:
        yield f"{update.name} has other states"
    else:
        counts, loads = block.output("counts"), update.input("counts")
        if counts is None or loads is None or (counts.shape, counts.dtype) != (loads.shape, loads.dtype):
            yield f"{update.name} takes other counts than {block.name} gives"
        elif not _is_per_rank(counts, program.mesh(block.experts or "dense")):
            yield f"the layout of %{counts.name} is {counts.layout}: each rank must have its own"
        elif not _is_per_rank(loads, program.mesh("dense")):
            yield f"the layout of %{loads.name} of {update.name} is {loads.layout}: each rank must have its own"


def _is_per_rank(counts: Value, mesh: Mesh) -> bool:
    """Whether each rank is one source. Then a sum over all ranks of one mesh is a sum over those of another."""
    axes = mesh.wide_axes()
    layout = counts.layout or REPLICATED
    return set(layout.axes) == set(axes) == set(layout.cuts(0))

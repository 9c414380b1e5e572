"""Prints the text form of a Program, for plans, golden tests and `--emit=ir`. `parse.py` reads it back.

A statement is a line. A line ends in ` at 14` where it comes from line 14 of the program's main source, and in
` at "library:other.moe" 14` where it comes from another source.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator

from moec.passes.ir.op import Op
from moec.passes.ir.program import Block, Output, Program
from moec.passes.ir.source_line import SourceLine
from moec.passes.ir.texts.layer_text import layer_lines
from moec.passes.ir.texts.order_text import order_lines
from moec.passes.ir.value import VECTOR, Attribute, Parameter, Value

BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""Strings that need no quotes."""

Place = Callable[[SourceLine | None], str]
"""Prints the source line that a statement comes from."""


def print_program(program: Program, spans: bool = True) -> str:
    """The Program as text; `spans` adds the `.moe` line of each op."""
    return "".join(f"{line}\n" for line in program_lines(program, spans))


def program_lines(program: Program, spans: bool = True) -> Iterator[str]:
    """The lines of `print_program`, one by one."""
    main = main_source(program) if spans else None
    source = "" if main is None else f" from {json.dumps(main)}"

    def place(span: SourceLine | None) -> str:
        if span is None or not spans:
            return ""
        return f" at {span.line}" if span.file == main else f" at {json.dumps(span.file)} {span.line}"

    yield f"program {json.dumps(program.name)}{source} {{"
    for mesh in program.meshes:
        axes = ", ".join(f"{axis} = {size}" for axis, size in mesh.axes)
        yield f"  mesh {json.dumps(mesh.name)} {{{axes}}}"
    if program.tokens.placements:
        yield f"  tokens @ {program.tokens}"
    if program.microbatches > 1:
        yield f"  microbatches {program.microbatches}"
    for block in program.blocks:
        yield ""
        yield from _block(block, place)
    yield from layer_lines(program.layers)
    for stage in program.stages:
        ranks = f"{stage.first_rank}..{stage.ranks[-1]}"
        yield f"  stage {stage.index} on ranks {ranks} runs {json.dumps(stage.forward)}"
    if len(program.stages) > 1:
        yield f"  schedule {program.schedule}"
    for order in program.orders:
        yield from order_lines(order)
    yield "}"


def main_source(program: Program) -> str | None:
    """The file that most ops name, the first such file in a tie; None where no op names a file."""
    files = Counter(op.span.file for block in program.blocks for op in block.ops if op.span)
    return max(files, key=lambda file: files[file], default=None)


def _block(block: Block, place: Place) -> Iterator[str]:
    inputs = ", ".join(f"%{v.name}: {print_type(v)}{f' as {v.role}' if v.role else ''}" for v in block.inputs)
    mesh = f" on {json.dumps(block.experts)}" if block.experts else ""
    update = f" updated by {json.dumps(block.update)}" if block.update else ""
    final = " final" if block.final else ""
    recompute = f" recompute {block.recompute}" if block.recompute != "none" else ""
    yield f"  block {json.dumps(block.name)}{mesh}{update}{final}{recompute} ({inputs}){place(block.span)} {{"
    for setting in block.settings:
        yield f"    setting ${setting.name}: {print_type(setting)} = {setting.default} in {setting.low}..{setting.high}"
    for state in block.states:
        yield f"    state ^{state.name}: {print_type(state)} = {state.init}{place(state.span)}"
    for table in block.tables:
        yield f"    table %{table.name}: {print_type(table)}"
    for parameter in block.parameters:
        yield f"    {_parameter(parameter)}{place(parameter.span)}"
    for op in block.ops:
        yield f"    {print_op(op)}{place(op.span)}"
    yield f"    return {', '.join(map(_output, block.outputs))}"
    yield "  }"


def _output(output: Output) -> str:
    owner = "" if output.layer is None else f"({output.layer})"
    if output.state is not None:
        owner = f"(^{output.state})"
    return f"{_name(output.name)} as {output.role}{owner}"


def _parameter(p: Parameter) -> str:
    text = f"parameter @{p.name}: {print_type(p)} = {p.init}"
    if p.decays:
        text += " decays"
    if p.frozen:
        text += " frozen"
    if p.shard:
        text += f" shard({', '.join(f'{axis} = {dim}' for axis, dim in p.shard)})"
    if p.sum_over is not None:
        text += f" sum_over({', '.join(p.sum_over)})"
    if p.guests:
        text += f" guests({p.guests})"
    layouts = (p.layout, p.weight, p.gradient, p.optimizer_state)
    words = zip(("weight", "gradient", "optimizer"), layouts[1:], layouts[:-1], strict=True)
    text += "".join(f" {word}({layout})" for word, layout, outer in words if layout != outer)
    if p.matrices != VECTOR:
        text += f" matrices({p.matrices.stack}, {p.matrices.rows})" + " hidden" * p.matrices.hidden
    return text


def print_op(op: Op) -> str:
    """One op on one line, without its span. Attributes that have their defaults are left out."""
    results = ", ".join(f"%{v.name}" for v in op.results)
    attributes = ", ".join(f"{name} = {_attribute(value)}" for name, value in _stated(op).items())
    braces = f" {{{attributes}}}" if attributes else ""
    types = ", ".join(print_type(v) for v in op.results)
    return f"{results} = {op.mnemonic} {_operands(op)}{braces} : {types}"


def _stated(op: Op) -> dict[str, Attribute]:
    defaults = op.attribute_defaults()
    return {name: value for name, value in op.attributes().items() if name not in defaults or value != defaults[name]}


def print_type(value: Value) -> str:
    """`bf16[batch, sequence, 4096] @ dp:shard(0)`; a ragged value names the counts of its rows."""
    dims = ", ".join(f"rows by %{value.ragged}" if dim == "rows" else str(dim) for dim in value.shape)
    layout = "" if value.layout is None else f" @ {value.layout}"
    return f"{value.dtype}[{dims}]{layout}"


def _name(operand: str) -> str:
    return operand if operand[0] in "@$^" else f"%{operand}"


def _operands(op: Op) -> str:
    """The operands, optional ones by their names: `%rows, @up, weights = %w`."""
    names = [_name(operand) for operand in op.operands]
    required = len(names) - len(op.optional)
    optional = [f"{name} = {operand}" for name, operand in zip(op.optional, names[required:], strict=True)]
    return ", ".join([*names[:required], *optional])


def _attribute(value: Attribute) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value if BARE.match(value) and value not in ("true", "false") else json.dumps(value)
        case tuple():
            return f"[{', '.join(_attribute(v) for v in value)}]"
    return repr(value)

"""The text form of a Program: what golden tests compare and `--emit=ir` prints. `parse.py` reads it back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from moec.grammar.source import Span
from moec.passes.ir.op import Op
from moec.passes.ir.program import Block, Program
from moec.passes.ir.value import Attribute, Parameter, Value

BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""Strings that need no quotes."""


def print_program(program: Program, spans: bool = True) -> str:
    """The Program as text; `spans` adds the `.moe` line of each op as a comment."""
    lines = [f"program {json.dumps(program.name)} {{"]
    for mesh in program.meshes:
        axes = ", ".join(f"{axis} = {size}" for axis, size in mesh.axes)
        lines.append(f"  mesh {json.dumps(mesh.name)} {{{axes}}}")
    if program.tokens.placements:
        lines.append(f"  tokens @ {program.tokens}")
    for block in program.blocks:
        lines += ["", *(f"  {line}" for line in _block(block, spans))]
    lines += [f"  stage {s.index} {{{', '.join(json.dumps(name) for name in s.blocks)}}}" for s in program.stages]
    return "\n".join([*lines, "}", ""])


def _block(block: Block, spans: bool) -> Iterator[str]:
    inputs = ", ".join(f"%{v.name}: {print_type(v)}" for v in block.inputs)
    mesh = f" on {json.dumps(block.experts)}" if block.experts else ""
    final = " final" if block.final else ""
    yield f"block {json.dumps(block.name)}{mesh}{final} ({inputs}) {{{_comment(block.span, spans)}"
    for parameter in block.parameters:
        yield f"  {_parameter(parameter)}{_comment(parameter.span, spans)}"
    for op in block.ops:
        yield f"  {print_op(op)}{_comment(op.span, spans)}"
    yield f"  return {_names(block.outputs)}"
    yield "}"


def _parameter(p: Parameter) -> str:
    text = f"parameter @{p.name}: {print_type(p)} = {p.init}"
    if p.decays:
        text += " decays"
    return text if p.sum_over is None else f"{text} sum_over({', '.join(p.sum_over)})"


def print_op(op: Op) -> str:
    """One op on one line, without its span."""
    results = ", ".join(f"%{v.name}" for v in op.results)
    attributes = ", ".join(f"{name} = {_attribute(value)}" for name, value in op.attributes().items())
    braces = f" {{{attributes}}}" if attributes else ""
    types = ", ".join(print_type(v) for v in op.results)
    return f"{results} = {op.mnemonic} {_names(op.operands)}{braces} : {types}"


def print_type(value: Value) -> str:
    """`bf16[batch, sequence, 4096] @ dp:shard(0)`; a ragged value names what counts its rows."""
    dims = ", ".join(f"rows by %{value.ragged}" if dim == "rows" else str(dim) for dim in value.shape)
    layout = "" if value.layout is None else f" @ {value.layout}"
    return f"{value.dtype}[{dims}]{layout}"


def _names(operands: Sequence[str]) -> str:
    return ", ".join(name if name.startswith("@") else f"%{name}" for name in operands)


def _attribute(value: Attribute) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value if BARE.match(value) and value not in ("true", "false") else json.dumps(value)
        case tuple():
            return f"[{', '.join(_attribute(v) for v in value)}]"
    return repr(value)


def _comment(span: Span | None, spans: bool) -> str:
    return f"    # {span}" if spans and span else ""

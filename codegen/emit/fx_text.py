"""Prints the torch.fx graphs of a Program as Python for people to read. The text is never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from moec.codegen.emit.emitter import info_of, target_name
from moec.codegen.emit.functions import emit_graph
from moec.passes.ir import Block, Program


def fx_text(program: Program) -> str:
    """One function per block; each line ends in its value's name in the Program, its layout and its `.moe` line."""
    return "\n".join("\n".join(_function(program, block)) + "\n" for block in program.blocks)


def _function(program: Program, block: Block) -> Iterator[str]:
    graph = emit_graph(program, block)
    name = "".join(c if c.isalnum() else "_" for c in block.name).strip("_")
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    yield f"def {name}(  # {block.name}"
    yield from (f"    {_noted(f'{node.name},', node)}" for node in inputs)
    yield "):"
    yield from (f"    {_noted(_statement(node), node)}" for node in graph.nodes if node.op != "placeholder")


def _statement(node: fx.Node) -> str:
    args = [_argument(arg) for arg in node.args] + [f"{name}={_argument(arg)}" for name, arg in node.kwargs.items()]
    match node.op, target_name(node):
        case "output", _:
            return f"return {', '.join(args)}"
        case "call_module", layer:
            return f"{node.name} = layers[{layer.rpartition('.')[2]}]({', '.join(args)})"
        case _, "getitem":
            return f"{node.name} = {args[0]}[{args[1]}]"
        case _, operator:
            return f"{node.name} = torch.ops.{operator}({', '.join(args)})"


def _argument(arg: Any) -> str:
    match arg:
        case fx.Node():
            return arg.name
        case torch.dtype():
            return str(arg)
        case tuple() | list():
            return f"({', '.join(map(_argument, arg))})"
    return repr(arg)


def _noted(text: str, node: fx.Node) -> str:
    info = info_of(node)
    notes = []
    if info.value is not None:
        key = info.key if info.key[0] in "@$^" else f"%{info.key}"
        notes += [key, str(info.value.layout or "")]
    if info.op is not None and info.op.span:
        notes.append(str(info.op.span))
    return f"{text}  # {', '.join(note for note in notes if note)}" if notes else text

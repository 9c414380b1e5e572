"""`moec inspect PLAN --graph`: the ops of a plan as a picture, in Mermaid or DOT. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moec.codegen.plan import Plan
from moec.commands.console.given_plan import given_plan
from moec.passes.ir import Block, Op
from moec.passes.ir.ops import Conversion


def picture_of(path: Path, kind: str, style: str) -> str:
    """The picture of the plan in `path`: `kind` is mermaid or dot."""
    return "\n".join(_picture(given_plan(path, style), kind))


def _picture(plan: Plan, kind: str) -> Iterator[str]:
    """Every block of the plan, with an arrow from each op to its consumers; collectives are highlighted."""
    mermaid = kind == "mermaid"
    yield "flowchart TD" if mermaid else "digraph plan {\n  node [shape = box]"
    for number, block in enumerate(plan.program.blocks):
        title = block.name.replace('"', "'")
        yield f'  subgraph g{number}["{title}"]' if mermaid else f'  subgraph cluster_{number} {{\n  label = "{title}"'
        yield from _ops(block, f"g{number}_", mermaid)
        yield "  end" if mermaid else "  }"
    if not mermaid:
        yield "}"


def _ops(block: Block, prefix: str, mermaid: bool) -> Iterator[str]:
    nodes = {value.name: f"{prefix}in{index}" for index, value in enumerate(block.inputs)}
    for name, node in nodes.items():
        yield _drawn(node, f"%{name}", False, mermaid)
    for index, op in enumerate(block.ops):
        node = f"{prefix}op{index}"
        yield _drawn(node, _label(op), isinstance(op, Conversion), mermaid)
        sources = dict.fromkeys(nodes[name] for name in op.operands if name in nodes)
        yield from (f"    {source} {'-->' if mermaid else '->'} {node}" for source in sources)
        nodes.update({value.name: node for value in op.results})
    yield _drawn(f"{prefix}out", "return", False, mermaid)
    results = dict.fromkeys(nodes[output.name] for output in block.outputs)
    yield from (f"    {source} {'-->' if mermaid else '->'} {prefix}out" for source in results)


def _drawn(node: str, label: str, loud: bool, mermaid: bool) -> str:
    if mermaid:
        return f'    {node}{"([" if loud else "["}"{label}"{"])" if loud else "]"}'
    return f'    {node} [label = "{label}"{", style = filled, fillcolor = gold" if loud else ""}]'


def _label(op: Op) -> str:
    results = ", ".join(f"%{value.name}" for value in op.results)
    return f"{results} = {op.mnemonic}{f' ({op.span})' if op.span else ''}"

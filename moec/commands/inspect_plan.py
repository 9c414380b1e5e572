"""`moec inspect PLAN`: what is communicated, what a rank holds, and the graphs as pictures. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from moec.codegen.graph import Graph, Node
from moec.codegen.operators import CONVERSIONS
from moec.codegen.plan import Body, ParameterData, Plan
from moec.commands.summary import amount_of_bytes, count
from moec.driver import load, run_passes
from moec.passes.ir import Layout, Program, Shard
from moec.passes.ir.ops import Collective
from moec.passes.tally import MASTER_BYTES, sent_bytes, sequence_of


@dataclass(frozen=True, slots=True)
class Row:
    """One collective of a body: over which group, what a rank sends, forward and backward, and for which line."""

    what: str
    group: str
    ranks: int
    forward: float
    backward: str
    backward_bytes: float
    span: str


def inspect_plan(path: Path, rank: int | None, picture: str | None) -> str:
    """The text for a whole plan, for one rank of it, or its graphs as `mermaid` or `dot`."""
    plan = load(path)
    if rank is not None and not 0 <= rank < plan.world_size:
        raise typer.BadParameter(f"--rank is from 0 to {plan.world_size - 1}, not {rank}")
    if picture is not None:
        return "\n".join(_picture(plan, picture))
    if rank is not None:
        return "\n".join(_rank(plan, rank))
    return "\n".join(_plan(plan))


# ---- the whole plan --------------------------------------------------------------------------------


def _plan(plan: Plan) -> Iterator[str]:
    yield f"{plan.name}: {count(plan.world_size, 'rank')}, {count(len(plan.parameters), 'parameter')}"
    yield ""
    for mesh in plan.meshes.values():
        yield f"  mesh {mesh.name}: {' × '.join(f'{axis} {size}' for axis, size in mesh.axes)}"
    for name, lists in plan.manifest.groups.items():
        shown = ", ".join(_ranks(ranks) for ranks in lists[:4])
        more = ", …" if len(lists) > 4 else ""
        yield f"  group {name}: {count(len(lists), 'communicator')} of {len(lists[0])}: {shown}{more}"
    program = run_passes(plan.spec).program
    for body in plan.manifest.bodies:
        yield ""
        runs = f", {count(len(body.layers), 'layer')}" if body.layers else ""
        yield f"{body.graph}{runs}"
        yield from _table([*_collectives(plan, program, body), *_gradients(plan, body)])


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, ranks))}]" if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}]"


def _collectives(plan: Plan, program: Program, body: Body) -> Iterator[Row]:
    """Those of the plan's own graph; how much each moves, the Program of the same Spec knows."""
    spec = plan.spec
    sequence = sequence_of(spec)
    batch = spec.train.batch if spec.train else plan.data_size
    block = program.block(body.graph)
    ops = {value.name: op for op in block.ops if isinstance(op, Collective) for value in op.results}
    for node in plan.stages[0].graph(body.graph).nodes:
        if node.target not in CONVERSIONS:
            continue
        group = next(arg for arg in node.args if isinstance(arg, str))
        name = node.value or node.name.removesuffix("_all").replace("_", ".")
        op = ops.get(name)
        forward, backward = sent_bytes(program, block, op, batch, sequence) if op else (math.nan, math.nan)
        ranks = len(plan.manifest.groups[group][0])
        back = " back" if node.args[-1] is True else ""
        what = f"{node.target.split('.')[1]}{back} %{name}"
        yield Row(what, group, ranks, forward, op.backward if op else "?", backward, node.span or "")


def _gradients(plan: Plan, body: Body) -> Iterator[Row]:
    """The sums of gradients, by group."""
    sums: dict[str, float] = {}
    for parameter in body.parameters:
        for group in parameter.sum_over:
            sums[group] = sums.get(group, 0.0) + _local_elements(plan, parameter) * MASTER_BYTES
    for group, size in sums.items():
        ranks = len(plan.manifest.groups[group][0])
        yield Row("gradients", group, ranks, 0, "all_reduce", 2 * size * (ranks - 1) / ranks, "")


def _table(rows: list[Row]) -> Iterator[str]:
    if not rows:
        yield "  nothing is communicated"
        return
    cells = [
        (r.what, r.group, f"{r.ranks}", _amount(r.forward), r.backward, _amount(r.backward_bytes), r.span) for r in rows
    ]
    head = ("forward", "group", "ranks", "sent per rank", "backward", "sent per rank", "serves")
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    for row in (head, *cells):
        yield ("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()


def _amount(number: float) -> str:
    return amount_of_bytes(number) if number else "-"


# ---- one rank --------------------------------------------------------------------------------------


def _rank(plan: Plan, rank: int) -> Iterator[str]:
    share = f"reads share {plan.data_rank(rank)} of {plan.data_size} of a batch"
    yield f"{plan.name}, rank {rank} of {plan.world_size}: {share}"
    yield ""
    for mesh in plan.meshes.values():
        yield f"  mesh {mesh.name}: {', '.join(f'{axis} {mesh.coordinate(rank, axis)}' for axis, _ in mesh.axes)}"
    for name, lists in plan.manifest.groups.items():
        peers = next(ranks for ranks in lists if rank in ranks)
        yield f"  talks over {name} to {_ranks(tuple(peer for peer in peers if peer != rank))}"
    held = sum(_local_elements(plan, p) for p in plan.parameters.values())
    yield f"  holds {held:,} of {sum(math.prod(p.shape) for p in plan.parameters.values()):,} elements"
    for body in plan.manifest.bodies:
        if not body.parameters:
            continue
        yield ""
        yield f"{body.graph}"
        width = max(len(p.name) for p in body.parameters)
        for p in body.parameters:
            yield f"  {p.name.ljust(width)}  {p.dtype}{_held(plan, p, rank)}  of {list(p.shape)}  {p.layout}"


def _held(plan: Plan, parameter: ParameterData, rank: int) -> str:
    """`[4:8, 64]`: the part of each dim that the rank holds."""
    parts = [str(size) for size in parameter.shape]
    mesh = plan.meshes[parameter.mesh]
    for axis, placement in Layout.parse(parameter.layout).placements:
        assert isinstance(placement, Shard)
        each = parameter.shape[placement.dim] // mesh.size(axis)
        first = each * mesh.coordinate(rank, axis)
        parts[placement.dim] = f"{first}:{first + each}"
    return f"[{', '.join(parts)}]"


def _local_elements(plan: Plan, parameter: ParameterData) -> int:
    mesh = plan.meshes[parameter.mesh]
    axes = Layout.parse(parameter.layout).sharded_axes()
    return math.prod(parameter.shape) // math.prod(mesh.size(axis) for axis in axes)


# ---- pictures --------------------------------------------------------------------------------------


def _picture(plan: Plan, kind: str) -> Iterator[str]:
    """Every graph of the plan, an arrow from each node to those that use it; collectives stand out."""
    mermaid = kind == "mermaid"
    yield "flowchart TD" if mermaid else "digraph plan {\n  node [shape = box]"
    for number, graph in enumerate(plan.stages[0].graphs):
        title = graph.name.replace('"', "'")
        yield f'  subgraph g{number}["{title}"]' if mermaid else f'  subgraph cluster_{number} {{\n  label = "{title}"'
        yield from _nodes(graph, f"g{number}_", mermaid)
        yield "  end" if mermaid else "  }"
    if not mermaid:
        yield "}"


def _nodes(graph: Graph, prefix: str, mermaid: bool) -> Iterator[str]:
    parameters = {node.name for node in graph.nodes if node.op == "get_attr"}
    for node in graph.nodes:
        if node.name in parameters:
            continue
        label, loud = _label(node), node.target in CONVERSIONS
        name = f"{prefix}{node.name}"
        if mermaid:
            yield f'    {name}{"([" if loud else "["}"{label}"{"])" if loud else "]"}'
        else:
            yield f'    {name} [label = "{label}"{", style = filled, fillcolor = gold" if loud else ""}]'
        arrow = "-->" if mermaid else "->"
        yield from (f"    {prefix}{source} {arrow} {name}" for source in node.refs() if source not in parameters)


def _label(node: Node) -> str:
    what = node.target if node.op == "call_function" else f"{node.op} {node.target}"
    return f"{node.name}: {what}{f' ({node.span})' if node.span else ''}"

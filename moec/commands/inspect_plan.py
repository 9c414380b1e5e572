"""`moec inspect PLAN`: its collectives, a rank's shards, and the ops as pictures. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from moec.codegen.plan import Plan, PlanParameter, parameters_of_block
from moec.commands.inspect_work import work_table
from moec.commands.table import amount_or_dash, table
from moec.driver import load
from moec.grammar.amounts import count
from moec.passes.cost.totals import BlockCost
from moec.passes.cost.weight_traffic import sendings
from moec.passes.cost.workload import Workload
from moec.passes.ir import Block, Layout, Op, Program, local_shape, local_slices
from moec.passes.ir.interface import layers_by_block
from moec.passes.ir.mesh import group_name
from moec.passes.ir.op import layout_of
from moec.passes.ir.ops import Conversion
from moec.passes.place.shard_zero import is_zero_gather

HEAD = ("collective", "group", "ranks", "sent forward", "backward", "sent backward", "line")


@dataclass(frozen=True, slots=True)
class Row:
    """One collective of a block: its group, what a rank sends forward and backward, and the line of the file."""

    what: str
    group: str
    ranks: int
    forward: float
    backward: str
    backward_bytes: float
    span: str


def inspect_plan(path: Path, rank: int | None, picture: str | None) -> str:
    """The text for a whole plan, for one rank of it, or its ops as `mermaid` or `dot`."""
    plan = load(path)
    if rank is not None and not 0 <= rank < plan.world_size:
        raise click.BadParameter(f"--rank is from 0 to {plan.world_size - 1}, not {rank}")
    if picture is not None:
        return "\n".join(_picture(plan, picture))
    if rank is not None:
        return "\n".join(_rank(plan, rank))
    return "\n".join(_plan(plan))


# ---- the whole plan --------------------------------------------------------------------------------


def _plan(plan: Plan) -> Iterator[str]:
    frozen = sum(p.frozen for p in plan.parameters.values())
    of_them = f", {frozen} of them frozen" if frozen else ""
    yield f"{plan.name}: {count(plan.world_size, 'rank')}, {count(len(plan.parameters), 'parameter')}{of_them}"
    yield ""
    for mesh in plan.meshes.values():
        yield f"  mesh {mesh.name}: {' × '.join(f'{axis} {size}' for axis, size in mesh.axes)}"
    for name, lists in plan.groups.items():
        shown = ", ".join(_ranks(ranks) for ranks in lists[:4])
        more = ", …" if len(lists) > 4 else ""
        yield f"  group {name}: {count(len(lists), 'communicator')} of {len(lists[0])}: {shown}{more}"
    yield f"  Below: one rank's step{_of_microbatches(plan.program)}; equal layers are shown once."
    layers, workload = layers_by_block(plan.program), Workload.of_microbatch(plan.spec, plan.program).even
    for block in plan.program.blocks:
        runs = f", {count(len(layers[block.name]), 'layer')}" if layers[block.name] else ""
        yield ""
        yield f"{block.name}{runs}{f', recomputes {block.recompute}' * (block.recompute != 'none')}"
        cost = BlockCost.of(plan.program, block, workload)
        microbatches = plan.program.microbatches
        yield from _communication([*_collectives(cost, microbatches), *_parameters(cost, microbatches)])
        yield from work_table(cost, microbatches)


def _of_microbatches(program: Program) -> str:
    parts = program.microbatches
    return f" of {parts} micro-batches (kept for backward: of one of them)" if parts > 1 else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, ranks))}]" if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}]"


def _collectives(cost: BlockCost, microbatches: int) -> Iterator[Row]:
    """The conversions of a block, with the bytes that a rank sends in a step; `cost` is that of a micro-batch."""
    for op, of_op in cost.costs:
        for sent in of_op.sent if not is_zero_gather(op) else ():
            back = " back" if getattr(op, "reverse", False) else ""
            what = f"{op.mnemonic}{back} %{op.results[0].name}"
            group, ranks = group_name(sent.axis, cost.block.experts), cost.workload.meshes.size(sent.axis)
            span = str(op.span) if op.span else ""
            forward, backward = microbatches * sent.forward, microbatches * sent.backward
            yield Row(what, group, ranks, forward, sent.backward_op, backward, span)


def _parameters(cost: BlockCost, microbatches: int) -> Iterator[Row]:
    """The gathers of weights and the sums of gradients, by collective and group."""
    sent: dict[tuple[str, str, str], tuple[float, float]] = {}
    for each in sendings(cost.block, cost.workload, microbatches, cost.saved_parameters()):
        forward, backward = sent.get((each.of, each.collective, each.axis), (0.0, 0.0))
        sent[each.of, each.collective, each.axis] = forward + each.forward, backward + each.backward
    for (of, collective, axis), (forward, backward) in sent.items():
        group, ranks = group_name(axis, cost.block.experts), cost.workload.meshes.size(axis)
        what = f"{collective} of {of}" if forward else of
        yield Row(what, group, ranks, forward, collective if backward else "", backward, "")


def _communication(rows: list[Row]) -> Iterator[str]:
    if not rows:
        yield "  no communication"
        return
    cells = [
        (r.what, r.group, f"{r.ranks}", amount_or_dash(r.forward), r.backward, amount_or_dash(r.backward_bytes), r.span)
        for r in rows
    ]
    yield from table([HEAD, *cells])


# ---- one rank --------------------------------------------------------------------------------------


def _rank(plan: Plan, rank: int) -> Iterator[str]:
    part = f"its sequences are part {plan.data_rank(rank)} of {plan.data_size} of a batch (from 0)"
    yield f"{plan.name}, rank {rank} of {plan.world_size}: {part}"
    yield ""
    for mesh in plan.meshes.values():
        yield f"  mesh {mesh.name}: {', '.join(f'{axis} {mesh.coordinate(rank, axis)}' for axis, _ in mesh.axes)}"
    for name, lists in plan.groups.items():
        peers = next(ranks for ranks in lists if rank in ranks)
        yield f"  group {name} with {_ranks(tuple(peer for peer in peers if peer != rank))}"
    local = sum(_local_elements(plan, p) for p in plan.parameters.values())
    yield f"  holds {local:,} of {sum(math.prod(p.shape) for p in plan.parameters.values()):,} elements"
    for block in plan.program.blocks:
        if not block.parameters:
            continue
        yield ""
        yield f"{block.name}"
        width = max(len(p.name) for p in block.parameters)
        for p in parameters_of_block(block):
            others = "".join(f"  {what} {layout}" for what, layout in _other_layouts(block, p))
            others += "  frozen" * p.frozen
            yield f"  {p.name.ljust(width)}  {p.dtype}{_held(plan, p, rank)}  of {list(p.shape)}  {p.layout}{others}"
        for state in block.states if block.update else ():
            yield f"  {state.name.ljust(width)}  {state.dtype}{list(state.shape)}  updated by {block.update}"


def _other_layouts(block: Block, parameter: PlanParameter) -> Iterator[tuple[str, Layout]]:
    """The layouts of a parameter where it is used, of its gradient and of its optimizer state that are not its own."""
    used = ((f"used as %{name}", layout) for name, layout in _gathered(block, f"@{parameter.name}").items())
    for what, layout in (*used, ("gradient", parameter.gradient), ("optimizer state", parameter.optimizer_state)):
        if layout != parameter.layout:
            yield what, layout


def _gathered(block: Block, name: str) -> dict[str, Layout]:
    """The values that conversions make of a parameter and that other ops use, with their layouts."""
    made, used = {name}, dict[str, Layout]()
    for op in block.ops:
        if isinstance(op, Conversion) and op.operands[0] in made:
            made.add(op.results[0].name)
        else:
            used.update({each: layout_of(block.scope[each]) for each in op.operands if each in made - {name}})
    return used


def _held(plan: Plan, parameter: PlanParameter, rank: int) -> str:
    """`[4:8, 64]`: the part of each dim that the rank holds."""
    index = local_slices(parameter.shape, parameter.layout, plan.meshes[parameter.mesh], rank)
    parts = zip(index, parameter.shape, strict=True)
    return f"[{', '.join(str(n) if part == slice(0, n) else f'{part.start}:{part.stop}' for part, n in parts)}]"


def _local_elements(plan: Plan, parameter: PlanParameter) -> int:
    return math.prod(local_shape(parameter.shape, parameter.layout, plan.meshes[parameter.mesh]))


# ---- pictures --------------------------------------------------------------------------------------


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

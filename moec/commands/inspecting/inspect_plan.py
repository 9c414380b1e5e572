"""`moec inspect PLAN`: its meshes, groups, collectives and ops, or a rank's parts. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moec.codegen.plan import Plan
from moec.commands.console.given_plan import given_plan
from moec.commands.console.output import emit
from moec.commands.console.table import amount_or_dash, table
from moec.commands.inspecting.inspect_plan_document import BlockCollective, PlanBlock, PlanDocument, PlanMesh
from moec.commands.inspecting.inspect_rank import groups_with_pipelines, rank_document, rank_lines, shortened
from moec.commands.inspecting.inspect_work import work_of, work_table
from moec.commands.inspecting.pipeline_lines import pipeline_lines
from moec.grammar.amounts import count
from moec.passes.cost.totals import BlockCost
from moec.passes.cost.weight_traffic import sendings
from moec.passes.guests.place_guests import guest_bytes, guests_of
from moec.passes.ir import Block, Program
from moec.passes.ir.interface import HANDED_ON
from moec.passes.ir.mesh import group_name
from moec.passes.ir.op import Meshes
from moec.passes.ir.work.workload import Workload

HEAD = ("collective", "group", "ranks", "sent forward", "backward", "sent backward", "line")
MAX_COMMUNICATORS = 4
"""The most communicators of a group that the text shows; the document has all."""


def run(path: Path, rank: int | None, style: str) -> None:
    """Prints the plan, or one rank of it. Raises `DiagnosticError` for a rank that the plan does not have."""
    plan = given_plan(path, style)
    if rank is None:
        document = plan_document(plan)
        lines = pipeline_lines(plan.program, plan.spec)
        emit(style, lambda: (*plan_lines(document), *([""] if lines else []), *lines), lambda: document)
    else:
        rank_view = rank_document(plan, rank)
        emit(style, lambda: rank_lines(rank_view), lambda: rank_view)


def plan_document(plan: Plan) -> PlanDocument:
    """The document of a whole plan."""
    program = plan.program
    layers, workload = program.layers_by_block, Workload.of_microbatch(plan.spec, program).even
    blocks = []
    for block in program.blocks:
        cost = BlockCost.of(program, block, workload)
        collectives = [*_conversions(cost, program.microbatches), *_parameter_collectives(cost, program.microbatches)]
        collectives += [*_guests(block, cost.workload.meshes), *_messages(cost, program)]
        blocks.append(
            PlanBlock(
                name=block.name,
                layers=layers[block.name],
                recompute=block.recompute,
                collectives=collectives,
                ops=work_of(cost, program.microbatches),
            )
        )
    return PlanDocument(
        plan=plan.name,
        ranks=plan.world_size,
        parameters=len(plan.parameters),
        frozen=sum(parameter.frozen for parameter in plan.parameters.values()),
        microbatches=program.microbatches,
        meshes=[PlanMesh(name=mesh.name, axes=dict(mesh.axes)) for mesh in plan.meshes.values()],
        groups={name: [list(ranks) for ranks in lists] for name, lists in groups_with_pipelines(plan).items()},
        blocks=blocks,
    )


def _conversions(cost: BlockCost, microbatches: int) -> Iterator[BlockCollective]:
    """The conversions of a block; `cost` is that of a micro-batch."""
    for op, op_cost in cost.costs:
        for sent in op_cost.sent:
            yield BlockCollective(
                of=f"%{op.results[0].name}",
                group=group_name(sent.axis, cost.block.experts),
                ranks=cost.workload.meshes.size(sent.axis),
                forward=f"{op.mnemonic} back" if getattr(op, "reverse", False) else op.mnemonic,
                forward_bytes=microbatches * sent.forward,
                backward=sent.backward_op if sent.backward_op != "none" else None,
                backward_bytes=microbatches * sent.backward,
                line=str(op.span) if op.span else None,
            )


def _parameter_collectives(cost: BlockCost, microbatches: int) -> Iterator[BlockCollective]:
    """The gathers of weights and the sums of gradients, by collective and group."""
    sent: dict[tuple[str, str, str], tuple[float, float]] = {}
    for sending in sendings(cost.block, cost.workload, microbatches, cost.saved_parameters()):
        forward, backward = sent.get((sending.of, sending.collective, sending.axis), (0.0, 0.0))
        sent[sending.of, sending.collective, sending.axis] = forward + sending.forward, backward + sending.backward
    for (of, collective, axis), (forward, backward) in sent.items():
        yield BlockCollective(
            of=of,
            group=group_name(axis, cost.block.experts),
            ranks=cost.workload.meshes.size(axis),
            forward=collective if forward else None,
            forward_bytes=forward,
            backward=collective if backward else None,
            backward_bytes=backward,
            line=None,
        )


def _guests(block: Block, meshes: Meshes) -> Iterator[BlockCollective]:
    """What a rank sends of guests, with as many as it has slots, and of their gradients, once a step."""
    if number := guests_of(block):
        weights, gradients = guest_bytes(block)
        yield BlockCollective(
            of="guests",
            group=group_name("ep", block.experts),
            ranks=meshes.size("ep"),
            forward="all_to_all",
            forward_bytes=number * weights,
            backward="all_to_all" if gradients else None,
            backward_bytes=number * gradients,
            line=None,
        )


def _messages(cost: BlockCost, program: Program) -> Iterator[BlockCollective]:
    """What the block of a pipeline stage receives from the stage before and sends to the next one, on other ranks."""
    number = next((stage.index for stage in program.stages if stage.forward == cost.block.name), None)
    if number is None:
        return
    received = [(value, "receive", "send") for value in cost.block.inputs if value.role in HANDED_ON]
    outputs = [cost.block.output(role) for role in HANDED_ON] if number < len(program.stages) - 1 else []
    sent = [(value, "send", "receive") for value in outputs if value is not None]
    for other, values in ((number - 1, received), (number + 1, sent)):
        if not values or program.stages[other].first_rank == program.stages[number].first_rank:
            continue
        for value, forward, backward in values:
            size, has_gradient = program.microbatches * cost.workload.bytes(value), value.dtype != "int64"
            yield BlockCollective(
                of=f"%{value.name}",
                group="pp",
                ranks=len(program.stages_by_rank),
                forward=forward,
                forward_bytes=size if forward == "send" else 0.0,
                backward=backward if has_gradient else None,
                backward_bytes=size if backward == "send" and has_gradient else 0.0,
                line=None,
            )


def plan_lines(document: PlanDocument) -> Iterator[str]:
    """The document for people: the first communicators of a group, and the largest ops of a block."""
    frozen = f", {document.frozen} of them frozen" if document.frozen else ""
    yield f"{document.plan}: {count(document.ranks, 'rank')}, {count(document.parameters, 'parameter')}{frozen}"
    yield ""
    for mesh in document.meshes:
        yield f"  mesh {mesh.name}: {' × '.join(f'{axis} {size}' for axis, size in mesh.axes.items())}"
    for name, lists in document.groups.items():
        shown = ", ".join(shortened(ranks) for ranks in lists[:MAX_COMMUNICATORS])
        ellipsis = ", …" if len(lists) > MAX_COMMUNICATORS else ""
        yield f"  group {name}: {count(len(lists), 'communicator')} of {len(lists[0])}: {shown}{ellipsis}"
    parts = document.microbatches
    suffix = f" of {parts} micro-batches (kept for backward: of one of them)" if parts > 1 else ""
    yield f"  Below: one rank's step{suffix}; equal layers are shown once."
    for block in document.blocks:
        runs = f", {count(len(block.layers), 'layer')}" if block.layers else ""
        yield ""
        yield f"{block.name}{runs}{f', recomputes {block.recompute}' * (block.recompute != 'none')}"
        yield from _communication(block.collectives)
        yield from work_table(block.ops)


def _communication(collectives: list[BlockCollective]) -> Iterator[str]:
    if not collectives:
        yield "  no communication"
        return
    yield from table([HEAD, *map(_cells, collectives)])


def _cells(row: BlockCollective) -> tuple[str, ...]:
    is_value = row.of.startswith("%")
    label = f"{row.forward} {row.of}" if is_value else f"{row.forward} of {row.of}" if row.forward else row.of
    sizes = [amount_or_dash(size) for size in (row.forward_bytes, row.backward_bytes)]
    return label, row.group, str(row.ranks), sizes[0], row.backward or "none", sizes[1], row.line or ""

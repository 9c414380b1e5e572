"""`moec inspect PLAN --rank N`: the parts of parameters on one rank, and its peers. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence

from moec.codegen.plan import Plan, PlanParameter, parameters_of_block
from moec.commands.inspecting.inspect_plan_document import RankBlock, RankDocument, RankParameter, RankState
from moec.grammar.amounts import count
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.layer_numbers import numbered
from moec.passes.ir import Block, State, local_shape, local_slices
from moec.passes.ir.interface import stages_of_layers


def rank_document(plan: Plan, rank: int) -> RankDocument:
    """The document of `rank`. Raises `DiagnosticError` MOE0017 for a rank that the plan does not have."""
    if not 0 <= rank < plan.world_size:
        allowed = "0" if plan.world_size == 1 else f"0 to {plan.world_size - 1}"
        help = f"the plan is for {count(plan.world_size, 'rank')}"
        raise DiagnosticError([diagnose("MOE0017", None, f"--rank must be {allowed}, not {rank}", help=help)])
    meshes, elsewhere, stage_of = plan.meshes.values(), plan.elsewhere(rank), stages_of_layers(plan.program)
    here = [block for block in plan.program.blocks if _has_parameter(plan, block, elsewhere)]
    return RankDocument(
        plan=plan.name,
        rank=rank,
        ranks=plan.world_size,
        data_rank=plan.data_rank(rank),
        data_size=plan.data_size,
        coordinates={mesh.name: {axis: mesh.coordinate(rank, axis) for axis, _ in mesh.axes} for mesh in meshes},
        groups={
            name: list(next(peers for peers in lists if rank in peers))
            for name, lists in groups_with_pipelines(plan).items()
        },
        stages=list(plan.stages_of(rank)),
        model_layers=len(plan.program.layers),
        layers=[layer for layer, stage in stage_of.items() if stage in plan.stages_of(rank)],
        held_elements=sum(_local_elements(plan, p) for name, p in plan.parameters.items() if name not in elsewhere),
        elements=sum(math.prod(p.shape) for p in plan.parameters.values()),
        blocks=[_block(plan, block, rank) for block in here],
    )


def groups_with_pipelines(plan: Plan) -> dict[str, Sequence[Sequence[int]]]:
    """The communicators of each group, those of pipelines as `pp`."""
    return {**({"pp": plan.pipelines} if plan.pipeline > 1 else {}), **plan.groups}


def _has_parameter(plan: Plan, block: Block, elsewhere: Container[str]) -> bool:
    """Whether the rank has the parameters of the block, of one layer at least."""
    prefixes = plan.program.prefixes(block)
    return any(f"{prefix}{p.name}" not in elsewhere for prefix in prefixes for p in block.parameters)


def _block(plan: Plan, block: Block, rank: int) -> RankBlock:
    return RankBlock(
        name=block.name,
        parameters=[_parameter(plan, p, rank) for p in parameters_of_block(block)],
        states=[_state(state, block.update) for state in block.states] if block.update else [],
    )


def _state(state: State, update: str) -> RankState:
    shape = [int(size) for size in state.shape]
    return RankState(name=state.name, dtype=str(state.dtype), shape=shape, updated_by=update)


def _parameter(plan: Plan, parameter: PlanParameter, rank: int) -> RankParameter:
    parts = local_slices(parameter.shape, parameter.weight, plan.meshes[parameter.mesh], rank)
    return RankParameter(
        name=parameter.name,
        dtype=str(parameter.dtype),
        shape=list(parameter.shape),
        held=[(part.start, part.stop) for part in parts],
        layout=str(parameter.weight),
        other_layouts=_other_layouts(parameter),
        frozen=parameter.frozen,
    )


def rank_lines(document: RankDocument) -> Iterator[str]:
    """The document for people."""
    part = f"its sequences are part {document.data_rank} of {document.data_size} of a batch (from 0)"
    yield f"{document.plan}, rank {document.rank} of {document.ranks}: {part}"
    yield ""
    for mesh, coordinates in document.coordinates.items():
        yield f"  mesh {mesh}: {', '.join(f'{axis} {index}' for axis, index in coordinates.items())}"
    for name, ranks in document.groups.items():
        yield f"  group {name} with {shortened([peer for peer in ranks if peer != document.rank])}"
    if document.ranks > 1 and len(document.layers) < document.model_layers:
        stages = ", ".join(map(str, document.stages))
        yield f"  runs {numbered(document.layers)}, of stage{'s' if len(document.stages) > 1 else ''} {stages}"
    yield f"  holds {document.held_elements:,} of {document.elements:,} elements"
    for block in document.blocks:
        yield ""
        yield block.name
        width = max(len(parameter.name) for parameter in block.parameters)
        for p in block.parameters:
            notes = "".join(f"  {use} {layout}" for use, layout in p.other_layouts.items()) + "  frozen" * p.frozen
            yield f"  {p.name.ljust(width)}  {p.dtype}{_held(p)}  of {p.shape}  {p.layout}{notes}"
        for state in block.states:
            yield f"  {state.name.ljust(width)}  {state.dtype}{state.shape}  updated by {state.updated_by}"


def shortened(ranks: list[int]) -> str:
    """A list of ranks; of more than 8 ranks only the first two and the last."""
    return f"[{', '.join(map(str, ranks))}]" if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}]"


def _held(parameter: RankParameter) -> str:
    """`[4:8, 64]`: the part of each dim that the rank holds."""
    dims = zip(parameter.held, parameter.shape, strict=True)
    return f"[{', '.join(str(n) if part == (0, n) else f'{part[0]}:{part[1]}' for part, n in dims)}]"


def _other_layouts(parameter: PlanParameter) -> dict[str, str]:
    """The layouts of a parameter in use, of its gradient and of its optimizer state that are not its weight's."""
    layouts = {"in use": parameter.layout, "gradient": parameter.gradient, "optimizer state": parameter.optimizer_state}
    return {use: str(layout) for use, layout in layouts.items() if layout != parameter.weight}


def _local_elements(plan: Plan, parameter: PlanParameter) -> int:
    return math.prod(local_shape(parameter.shape, parameter.weight, plan.meshes[parameter.mesh]))

"""The JSON documents of `moec compile`: its summary as numbers, and what `--emit` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moec.codegen.plan import Plan
from moec.codegen.search_report import OtherPlan, PlannedCandidates
from moec.commands.console.output import document
from moec.commands.inspecting.summary import recomputing_layers
from moec.passes.cost.largest_skew import largest_skew
from moec.passes.cost.memory import memory_of
from moec.passes.cost.totals import tally
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.degrees.expert_slices import whole_experts
from moec.passes.degrees.guest_slots import greedy_of
from moec.passes.degrees.stated_degrees import mixtures_of
from moec.passes.ir import Program

Stage = Literal["ast", "spec", "ir", "placed", "fx", "kernels"]
"""The forms that `--emit` prints."""


@document
class ExpertDegrees:
    """How the experts of some layers are spread over ranks."""

    layers: list[int]
    ep: int
    ep_stated: bool
    """Whether the file says it."""
    etp: int
    edp: int
    guests: int
    """The slots of a rank for weights of other ranks' experts."""
    moves: bool
    """Whether experts may change ranks while it trains (`greedy`)."""


@document
class DegreesDocument:
    """The degrees of parallelism."""

    dp: int
    dp_stated: bool
    pp: int
    virtual: int
    """The pipeline stages of each rank."""
    schedule: str | None
    """The order of a pipeline's micro-batches; null without a pipeline."""
    cp: int
    tp: int
    experts: list[ExpertDegrees]
    whole_experts: dict[str, list[int]]
    """The layers with experts that their `etp` does not cut, by kind: `etp` gives these more data-parallel ranks."""


@document
class PerRank:
    """What the busiest rank has."""

    parameters: int
    state_bytes: int
    """Weights, gradients and optimizer states, as if all were held at once; `peak_bytes` counts each only while it is
    allocated.
    """
    activation_bytes: int
    """Activations kept for backward, of a micro-batch, without recomputation."""
    peak_bytes: int
    """The memory at the peak of a training step."""
    peak_event: str
    """When that is."""
    device_bytes: int
    """The memory of a device."""
    largest_load: float | None
    """A step fits while the busiest rank of experts has at most this many times the mean of rows; null: always."""


@document
class Send:
    """What a rank sends in a step."""

    bytes: int
    group: str
    ranks: int
    """How many ranks the group has."""
    purpose: str


@document
class CompiledPlan:
    """The summary of a compiled plan."""

    plan: str
    """The plan's folder."""
    name: str
    kind: Literal["model", "layer"]
    layers: int
    mixtures: int
    """How many of the layers are mixtures of experts."""
    dim: int
    dtype: str
    parameters: int
    active_parameters: int
    """Parameters that a token uses."""
    ranks: int
    device: str
    cluster: str
    degrees: DegreesDocument
    zero: int
    """0 to 3: what ZeRO cuts."""
    recompute: dict[str, list[int]]
    """The layers that recompute a part in backward, by part."""
    microbatches: int
    sequences: int
    """Sequences, or images, of a step over all ranks."""
    tokens: int
    """Tokens of a step over all ranks."""
    flops_per_token: float
    imbalance: float
    """Rows of the busiest rank of experts over the mean, by the file's `train.routing`."""
    per_rank: PerRank
    sends: list[Send]
    candidates: PlannedCandidates | None
    """The plans among which a search chose; null where the file leaves no word open."""
    runners_up: list[OtherPlan]
    """The next plans, the fastest first."""
    seconds: float
    """How long compiling took."""
    next: list[str]
    """What to run next."""


@document
class EmittedStage:
    """What `--emit` prints."""

    stage: Stage
    text: str


def compiled(plan: Plan, program: Program, path: Path, seconds: float) -> CompiledPlan:
    """The document of `plan`, which is in `path`."""
    spec = plan.spec
    counts, degrees, memory = tally(program, spec), choose_degrees(spec), memory_of(program, spec)

    mixtures = [moe for moe in spec.subject.mixtures if moe is not None]
    return CompiledPlan(
        plan=str(path),
        name=plan.name,
        kind="model" if spec.has_model else "layer",
        layers=spec.model.depth if spec.has_model else 1,
        mixtures=len(mixtures),
        dim=spec.subject.dim,
        dtype=str(spec.subject.dtype),
        parameters=round(counts.parameters),
        active_parameters=round(counts.active_parameters),
        ranks=program.num_ranks,
        device=spec.cluster.device.name,
        cluster=spec.cluster.name,
        degrees=DegreesDocument(
            dp=degrees.dp,
            dp_stated="dp" in degrees.stated,
            pp=degrees.pp,
            virtual=degrees.virtual,
            schedule=degrees.schedule,
            cp=degrees.cp,
            tp=degrees.tp,
            experts=[
                ExpertDegrees(
                    layers=list(experts.layers),
                    ep=experts.ep,
                    ep_stated=experts.stated,
                    etp=experts.etp,
                    edp=experts.edp,
                    guests=experts.guests or 0,
                    moves=greedy_of(spec) is not None and experts.ep > 1,
                )
                for experts in degrees.experts
            ],
            whole_experts=whole_experts(spec, mixtures_of(spec)),
        ),
        zero=degrees.zero,
        recompute=recomputing_layers(program),
        microbatches=program.microbatches,
        sequences=round(counts.sequences),
        tokens=round(counts.tokens),
        flops_per_token=float(counts.flops_per_token),
        imbalance=float(counts.imbalance),
        per_rank=PerRank(
            parameters=round(counts.local_parameters),
            state_bytes=round(counts.state_bytes),
            activation_bytes=round(counts.most_activation_bytes / program.microbatches),
            peak_bytes=round(memory.peak.bytes.total),
            peak_event=memory.peak.event,
            device_bytes=round(spec.cluster.device.memory),
            largest_load=largest_skew(program, spec),
        ),
        sends=[
            Send(bytes=round(flow.bytes), group=str(flow.group), ranks=flow.ranks, purpose=flow.purpose)
            for flow in counts.traffic
        ],
        candidates=plan.report.candidates if plan.report else None,
        runners_up=plan.report.runners_up if plan.report else [],
        seconds=seconds,
        next=[f"moec verify {path}"],
    )

"""The forward pass of one pipeline stage over one micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from moec.passes.ir import OutputKey, Program, Role, Stage
from moec.passes.ir.interface import COUNTS, HANDED_ON
from moec.runtime.errors import JobError
from moec.runtime.inputs.extra_inputs import ExtraInputs
from moec.runtime.ranks.checks import Complaint
from moec.runtime.refused_derivatives import unwrapped

if TYPE_CHECKING:
    from moec.runtime.model.module import PlanModule

P = ParamSpec("P")
R = TypeVar("R")


class LayerElsewhere(nn.Module):
    """A layer of another pipeline stage, in its place in `model.layers`: this rank has none of its parameters."""

    def __init__(self, number: int, place: str) -> None:
        super().__init__()
        self._number, self._place = number, place

    def forward(self, *inputs: Tensor) -> Tensor:
        """Raises `JobError`."""
        raise JobError("MOE0711", self._words, "`job.step` runs the stages of all ranks")

    @property
    def _words(self) -> str:
        return f"layer {self._number} is in {self._place}"

    def __getattr__(self, name: str) -> Any:
        """Raises `AttributeError`, which says where the layer is."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: {self._words}") from None

    def extra_repr(self) -> str:
        return self._place


def require_whole(program: Program, call: str, help: str = "`job.step` trains it") -> None:
    """Raises `JobError` in a pipeline: `call` needs the layers of all stages."""
    if len(program.stages) > 1:
        raise needs_all_stages(program, call, help)


def of_whole_model(
    method: Callable[Concatenate[PlanModule, P], R],
) -> Callable[Concatenate[PlanModule, P], R]:
    """Decorates a method that no model in pipeline stages has, whatever its arguments."""

    @functools.wraps(method)
    def call(model: PlanModule, /, *args: P.args, **kwargs: P.kwargs) -> R:
        require_whole(model.program, f"model.{method.__name__}")
        return method(model, *args, **kwargs)

    return call


def needs_all_stages(program: Program, call: str, help: str) -> JobError:
    """The error of a `call` that needs the layers of all stages, of which each rank has only some."""
    message = f"{call} of a model with {len(program.stages)} pipeline stages, of which no rank has all"
    return JobError("MOE0711", message, f"{help}; a plan without `pp` loads its checkpoints, and has no stages")


class MicroBatch(NamedTuple):
    """This rank's sequences of a micro-batch. An evaluation has one micro-batch.

    `sequences`: their numbers in the global batch, int64 `[batch]`; None for a model that draws nothing.
    """

    tokens: Tensor
    labels: Tensor
    extra: ExtraInputs
    sequences: Tensor | None


class StageResult(NamedTuple):
    """The result of a stage's forward pass.

    `outputs`: what it hands on, by role; the last stage gives logits and the sum of balance terms. `routes`: those of
    its mixtures; None in a model without `replay`. `complaint`: about its router logits.
    """

    outputs: Mapping[Role, Tensor]
    routes: Tensor | None
    complaint: Complaint | None


def stage_pass(
    model: PlanModule, stage: int, batch: MicroBatch, received: Mapping[Role, Tensor], *, reads_values: bool
) -> StageResult:
    """Runs a stage. `received`: what the stage before it has handed on.

    Router logits that are not finite make all floating-point outputs NaN. The caller raises the complaint at the end of
    the step or evaluation.
    """
    tokens, extra = batch.tokens, batch.extra
    inputs: dict[Role, Tensor] = {**model.takes.inputs(extra, tokens), **received}
    inputs[model.input_role] = tokens
    if batch.sequences is not None:
        inputs["sequences"] = batch.sequences
    model.num_tokens = model.counters.real_tokens(tokens, extra)
    results, complaint = model.tops[stage].run(model, inputs, reads_values=reads_values)
    experts, heads, made = counts_by_layer(results)
    model.expert_counts, model.head_counts = model.expert_counts | experts, model.head_counts | heads
    model.choices_made = model.choices_made | made
    if model.training:
        model._updates.add(results)
        if stage == min(model.tops):
            model._home.count_pass(tokens, extra.segments, inputs.get("real"))
    roles: tuple[Role, ...] = (*HANDED_ON, "logits")
    outputs = {role: results[role, None, None] for role in roles if (role, None, None) in results}
    if complaint is not None:
        outputs = {role: x * torch.nan if x.is_floating_point() else x for role, x in outputs.items()}
    return StageResult(outputs, results.get(("routes", None, None)), complaint)


def counts_by_layer(results: Mapping[OutputKey, Any]) -> list[dict[int, Tensor]]:
    """The counts of each role of `COUNTS` that layers gave in a pass: layer → int64 `[…]`."""
    return [
        {n: unwrapped(rows[0]) for (r, n, _), rows in results.items() if r == role and n is not None} for role in COUNTS
    ]


def place_of_part(program: Program, name: str) -> str:
    """The first pipeline stage that has the part `name` outside of layers, in words; empty if none has."""
    for stage in program.stages:
        if any(p.name.startswith(f"{name}.") for p in program.block(stage.forward).parameters):
            return stage_in_words(stage)
    return ""


def stage_in_words(stage: Stage) -> str:
    """`stage 1, on ranks 4 to 7`."""
    first, last = stage.ranks[0], stage.ranks[-1]
    return f"stage {stage.index}, on " + (f"ranks {first} to {last}" if last > first else f"rank {first}")

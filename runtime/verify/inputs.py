"""The global batch of a comparison, and each rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.grammar.spec import Patches
from moec.passes.degrees.sequence_cuts import sequence_pieces
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.roles import FREE_ROUTE, IGNORED_LABEL, Role
from moec.passes.lower.lower_model import context_of
from moec.runtime.host.reference import reference_program
from moec.runtime.inputs.extra_inputs import AcceptedInputs

SEQUENCES_PER_RANK = 2
"""Sequences of a micro-batch on each rank."""
MOST_MICROBATCHES = 2
"""Two micro-batches show what any number shows: gradients add up, divided by the counts of the whole step."""
MAX_SEQUENCE = 16
LONGEST_WINDOW = 48
"""Sequences are longer than windows of attention up to this; wider ones would take too long."""
MOST_ROWS = 100
"""Random loads of experts are below this."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A batch, and each rank's part of it.

    `inputs` are a model's token ids `[batch, sequence]` or images, or a layer's x `[batch, sequence, dim]`. `targets`
    are labels `[batch, sequence]`, for images `[batch]`, or a cotangent of y `[batch, sequence, dim]`. Every x is a
    leaf: its gradient is compared too. The batch is in the order of micro-batches, and in each in the order of
    data-parallel ranks, so that the sequences of a routing group of the plan follow each other.
    """

    inputs: Tensor
    targets: Tensor
    rank_inputs: Sequence[Tensor]
    rank_targets: Sequence[Tensor]
    rank_rows: Sequence[slice]
    """The sequences of the global batch that each rank has of the first micro-batch."""
    loads: Mapping[int, Tensor]
    """For each layer with states, random expert loads of each rank, int64 `[ranks, experts]`. The loads of a batch may
    be too similar on all ranks to show that a rank's are left out."""
    microbatches: int = 1
    extra_inputs: Mapping[Role, Tensor] = field(default_factory=dict)
    """The other inputs of `forward` by role."""
    rank_extra_inputs: Mapping[Role, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def model_arguments(self) -> dict[str, Tensor]:
        """`extra_inputs` as arguments of an unsharded model."""
        arguments = {str(role): values for role, values in self.extra_inputs.items() if role != "real"}
        return arguments | ({"padding": 1 - self.extra_inputs["real"]} if "real" in self.extra_inputs else {})

    @property
    def extra_inputs_of_one_rank(self) -> dict[Role, Sequence[Tensor]]:
        """`extra_inputs` for the one rank of an unsharded model."""
        return {role: [values] for role, values in self.extra_inputs.items()}

    def to(self, dtype: torch.dtype) -> GlobalBatch:
        """Copies of x rounded to `dtype`, without gradients; ids and labels unchanged."""
        if not self.inputs.is_floating_point():
            return self
        if not self.targets.is_floating_point():  # images
            images = [images.to(dtype) for images in self.rank_inputs]
            return replace(self, inputs=self.inputs.to(dtype), rank_inputs=images)
        return replace(
            self,
            inputs=_leaf(self.inputs, dtype),
            targets=self.targets.to(dtype),
            rank_inputs=[_leaf(x, dtype) for x in self.rank_inputs],
            rank_targets=[cotangent.to(dtype) for cotangent in self.rank_targets],
        )


def microbatches_of(plan: Plan) -> int:
    """The micro-batches in which a plan is compared: the plan's, at most `MOST_MICROBATCHES`; one of a layer."""
    if len(plan.program.stages) > 1:
        return plan.program.microbatches
    return min(plan.program.microbatches, MOST_MICROBATCHES) if plan.spec.has_model else 1


def batch_shape(plan: Plan, microbatches: int) -> tuple[int, int]:
    """Sequences of the global batch, and tokens of each: of a model, a multiple of the ranks that split a sequence."""
    batch = plan.data_size * SEQUENCES_PER_RANK * microbatches
    if not plan.spec.has_model:
        return batch, MAX_SEQUENCE
    if plan.spec.model.length is not None:
        return batch, plan.spec.model.length
    pieces = sequence_pieces(plan.spec)
    windows = [w for layer in plan.spec.model.layers if (w := layer.attention.window or 0) <= LONGEST_WINDOW]
    longest = max((MAX_SEQUENCE, *(window + MAX_SEQUENCE // 2 for window in windows)))
    return batch, max(min(context_of(plan.spec), longest) // pieces, 1) * pieces


def global_batch(plan: Plan, seed: int, microbatches: int = 1) -> GlobalBatch:
    """Two random sequences per data-parallel rank and micro-batch."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = batch_shape(plan, microbatches)
    inputs, targets = _labelled(plan, generator, shape) if plan.spec.has_model else _vectors(plan, generator, shape)
    numbers = torch.arange(shape[0]).view(microbatches, plan.data_size, SEQUENCES_PER_RANK)
    rows = [numbers[:, plan.data_rank(rank)].flatten() for rank in range(plan.stage_size)]
    loads = _loads(plan, generator)
    extra_inputs = _extra_inputs(plan, generator, inputs)
    return GlobalBatch(
        inputs=inputs,
        targets=targets,
        rank_inputs=[inputs[part] for part in rows],
        rank_targets=[targets[part] for part in rows],
        rank_rows=[slice(int(part[0]), int(part[0]) + SEQUENCES_PER_RANK) for part in rows],
        loads=loads,
        microbatches=microbatches,
        extra_inputs=extra_inputs,
        rank_extra_inputs={role: [values[part] for part in rows] for role, values in extra_inputs.items()},
    ).to(torch.float64)


def _extra_inputs(plan: Plan, generator: torch.Generator, tokens: Tensor) -> dict[Role, Tensor]:
    """Random routes: half of the tokens choose by themselves; of the others a choice in eight is none. Random segments:
    a text begins at every fourth token. Random padding: a quarter of the tokens and the whole last sequence.
    """
    takes, extra_inputs = AcceptedInputs.of(plan.program), dict[Role, Tensor]()
    if takes.k:
        routes = tokens.new_full((*tokens.shape, len(takes.k), max(takes.k)), -1)
        for mixture, (experts, k) in enumerate(zip(takes.experts, takes.k, strict=True)):
            shuffled = torch.rand((*tokens.shape, experts), generator=generator).argsort(-1)[..., :k]
            is_none = torch.rand(shuffled.shape, generator=generator) < 1 / 8
            routes[:, :, mixture, :k] = shuffled.masked_fill(is_none, -1)
        is_free = torch.rand(tokens.shape, generator=generator) < 1 / 2
        extra_inputs["routes"] = routes.masked_fill(is_free[..., None, None], FREE_ROUTE)
    if takes.segments:
        extra_inputs["segments"] = 3 * (torch.rand(tokens.shape, generator=generator) < 1 / 4).cumsum(1)
    if takes.padding:
        real = (torch.rand(tokens.shape, generator=generator) < 3 / 4).to(torch.int64)
        real[-1] = 0
        extra_inputs["real"] = real
    return extra_inputs


def _loads(plan: Plan, generator: torch.Generator) -> dict[int, Tensor]:
    program, loads = reference_program(plan.spec), dict[int, Tensor]()
    for call in layer_calls(program):
        update = program.block(call.block).update
        counts = program.block(update).input("counts") if update is not None else None
        if counts is not None:
            shape = (plan.stage_size, cast(int, counts.shape[1]))
            loads[call.layer] = torch.randint(MOST_ROWS, shape, generator=generator)
    return loads


def _labelled(plan: Plan, generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random ids or normally distributed pixels, one label in eight ignored.

    If the model has a separator, an eighth of the tokens are separators. If it has a padding id, a quarter of the
    tokens and the whole last sequence are padding.
    """
    model = plan.spec.model
    if isinstance(patches := model.embedding, Patches):
        pixels = (shape[0], patches.channels, patches.image, patches.image)
        tokens = torch.randn(pixels, generator=generator, dtype=torch.float64)
        shape = shape[:1]
    else:
        tokens = torch.randint(model.outputs, shape, generator=generator)
    labels = torch.randint(model.outputs, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 1 / 8] = IGNORED_LABEL
    if (separator := model.embedding.separator) is not None:
        tokens[torch.rand(shape, generator=generator) < 1 / 8] = separator
    if (padding := model.embedding.padding_id) is not None:
        tokens[torch.rand(shape, generator=generator) < 1 / 4] = padding
        tokens[-1] = padding
    return tokens, labels


def _vectors(plan: Plan, generator: torch.Generator, batch: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """x and a cotangent, normal numbers. The cotangent has the scale of a mean over tokens, as `aux_loss` has."""
    shape = (*batch, plan.spec.subject.dim)
    x, cotangent = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, cotangent / (shape[0] * shape[1])


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype, copy=True).requires_grad_()

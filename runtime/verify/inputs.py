"""The inputs of a comparison: a global batch and each rank's part of it."""

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """Token ids and labels `[batch, sequence]` of a model, or images and labels `[batch]`; x and a cotangent of y
    `[batch, sequence, dim]` of a layer.

    Every x is a leaf: its gradient is compared too. The global batch is in the order of micro-batches, and in each in
    the order of data-parallel ranks, so that the sequences of a routing group of the plan follow each other.
    """

    given: Tensor
    targets: Tensor
    rank_given: Sequence[Tensor]
    rank_targets: Sequence[Tensor]
    rank_rows: Sequence[slice]
    """The sequences of the global batch that each rank has of the first micro-batch."""
    loads: Mapping[int, Tensor]
    """For each layer with states, random expert loads of each rank, int64 `[ranks, experts]`. The loads of a batch may
    be too similar on all ranks to show that a rank's are left out."""
    microbatches: int = 1
    beside: Mapping[Role, Tensor] = field(default_factory=dict)
    """The other inputs of `forward` by role, of the global batch."""
    rank_beside: Mapping[Role, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Tensor]:
        """`beside`, as an unsharded model takes it."""
        named = {str(role): whole for role, whole in self.beside.items() if role != "real"}
        return named | ({"padding": 1 - self.beside["real"]} if "real" in self.beside else {})

    @property
    def beside_alone(self) -> dict[Role, Sequence[Tensor]]:
        """`beside`, for the one rank of an unsharded model."""
        return {role: [whole] for role, whole in self.beside.items()}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Copies of x rounded to `dtype`, without gradients; ids and labels unchanged."""
        if not self.given.is_floating_point():
            return self
        if not self.targets.is_floating_point():  # images
            rounded = [images.to(dtype) for images in self.rank_given]
            return replace(self, given=self.given.to(dtype), rank_given=rounded)
        return Inputs(
            _leaf(self.given, dtype),
            self.targets.to(dtype),
            [_leaf(x, dtype) for x in self.rank_given],
            [cotangent.to(dtype) for cotangent in self.rank_targets],
            self.rank_rows,
            self.loads,
            self.microbatches,
            self.beside,
            self.rank_beside,
        )


def microbatches_of(plan: Plan) -> int:
    """The micro-batches in which a plan is compared: the plan's, at most `MOST_MICROBATCHES`; one of a layer."""
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


def global_batch(plan: Plan, seed: int, microbatches: int = 1) -> Inputs:
    """Two random sequences per data-parallel rank and micro-batch."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = batch_shape(plan, microbatches)
    given, targets = _labelled(plan, generator, shape) if plan.spec.has_model else _vectors(plan, generator, shape)
    numbers = torch.arange(shape[0]).view(microbatches, plan.data_size, SEQUENCES_PER_RANK)
    rows = [numbers[:, plan.data_rank(rank)].flatten() for rank in range(plan.stage_size)]
    first = [slice(int(each[0]), int(each[0]) + SEQUENCES_PER_RANK) for each in rows]
    parts = [given[part] for part in rows], [targets[part] for part in rows]
    loads = _loads(plan, generator)
    beside = _beside(plan, generator, given)
    of_ranks = {role: [whole[part] for part in rows] for role, whole in beside.items()}
    return Inputs(given, targets, *parts, first, loads, microbatches, beside, of_ranks).to(torch.float64)


def _beside(plan: Plan, generator: torch.Generator, tokens: Tensor) -> dict[Role, Tensor]:
    """Random routes: half of the tokens choose by themselves; of the others a choice in eight is none. Random segments:
    a text begins at every fourth token. Random padding: a quarter of the tokens and the whole last sequence.
    """
    takes, found = AcceptedInputs.of(plan.program), dict[Role, Tensor]()
    if takes.k:
        routes = tokens.new_full((*tokens.shape, len(takes.k), max(takes.k)), -1)
        for mixture, (experts, k) in enumerate(zip(takes.experts, takes.k, strict=True)):
            shuffled = torch.rand((*tokens.shape, experts), generator=generator).argsort(-1)[..., :k]
            none = torch.rand(shuffled.shape, generator=generator) < 1 / 8
            routes[:, :, mixture, :k] = shuffled.masked_fill(none, -1)
        free = torch.rand(tokens.shape, generator=generator) < 1 / 2
        found["routes"] = routes.masked_fill(free[..., None, None], FREE_ROUTE)
    if takes.segments:
        found["segments"] = 3 * (torch.rand(tokens.shape, generator=generator) < 1 / 4).cumsum(1)
    if takes.padding:
        found["real"] = (torch.rand(tokens.shape, generator=generator) < 3 / 4).to(torch.int64)
        found["real"][-1] = 0
    return found


def _loads(plan: Plan, generator: torch.Generator) -> dict[int, Tensor]:
    program, found = reference_program(plan.spec), dict[int, Tensor]()
    for call in layer_calls(program):
        update = program.block(call.block).update
        counts = program.block(update).input("counts") if update is not None else None
        if counts is not None:
            shape = (plan.stage_size, cast(int, counts.shape[1]))
            found[call.layer] = torch.randint(MOST_ROWS, shape, generator=generator)
    return found


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

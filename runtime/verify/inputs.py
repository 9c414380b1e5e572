"""What a plan and the unsharded model are compared on: a global batch, and each rank's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.lower.lower_model import context_of
from moec.runtime.job.batches import IGNORED_LABEL

SEQUENCES_PER_RANK = 2
MAX_SEQUENCE = 16


@dataclass(frozen=True, slots=True)
class Inputs:
    """Token ids and labels `[batch, sequence]` of a model; x and a cotangent of y `[batch, sequence, dim]` of a layer.

    Every x is a leaf: its gradient is compared too.
    """

    given: Tensor
    targets: Tensor
    rank_given: Sequence[Tensor]
    rank_targets: Sequence[Tensor]
    rank_rows: Sequence[slice]
    """Which sequences of the global batch each rank has."""

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers rounded to `dtype`, each x anew and without a gradient; ids and labels as they are."""
        if not self.given.is_floating_point():
            return self
        return Inputs(
            _leaf(self.given, dtype),
            self.targets.to(dtype),
            [_leaf(x, dtype) for x in self.rank_given],
            [cotangent.to(dtype) for cotangent in self.rank_targets],
            self.rank_rows,
        )


def global_batch(plan: Plan, seed: int) -> Inputs:
    """Two random sequences to each data-parallel rank."""
    generator = torch.Generator().manual_seed(seed + 1)
    given, targets = _ids(plan, generator) if plan.spec.has_model else _vectors(plan, generator)
    starts = [SEQUENCES_PER_RANK * plan.data_rank(rank) for rank in range(plan.world_size)]
    rows = [slice(start, start + SEQUENCES_PER_RANK) for start in starts]
    inputs = Inputs(given, targets, [given[part] for part in rows], [targets[part] for part in rows], rows)
    return inputs.to(torch.float64)


def _ids(plan: Plan, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random ids, one label in eight ignored; as many tokens to a sequence as the ranks that share it divide.

    Where the model has a padding id, a quarter of the tokens and the whole last sequence are padding.
    """
    sharing = plan.meshes["dense"].size("tp") * plan.meshes["dense"].size("cp")
    length = max(min(context_of(plan.spec), MAX_SEQUENCE) // sharing, 1) * sharing
    shape = (plan.data_size * SEQUENCES_PER_RANK, length)
    tokens = torch.randint(plan.spec.model.vocab, shape, generator=generator)
    labels = torch.randint(plan.spec.model.vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 1 / 8] = IGNORED_LABEL
    if (padding := plan.spec.model.embedding.padding) is not None:
        tokens[torch.rand(shape, generator=generator) < 1 / 4] = padding
        tokens[-1] = padding
    return tokens, labels


def _vectors(plan: Plan, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x and a cotangent, normal numbers. The cotangent is of a mean over tokens, as `aux_loss` is."""
    shape = (plan.data_size * SEQUENCES_PER_RANK, MAX_SEQUENCE, plan.spec.subject.dim)
    x, cotangent = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, cotangent / (shape[0] * shape[1])


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype, copy=True).requires_grad_()

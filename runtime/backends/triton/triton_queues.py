"""Queues of experts by rendered kernels, which count without sorting; the host never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moec.codegen.kernels.row_shapes import QueuesShape
from moec.runtime.backends.triton.triton_launch import Kernels, kernels_of


@dataclass(frozen=True, slots=True)
class Queues:
    """Counts of choices [B, S, k] by queue and expert: those in earlier blocks, and in all blocks, [B, k, E] int64.

    A queue is the j-th choices of one sequence. Choices of −1 are in no queue.
    """

    kernels: Kernels
    experts: Tensor
    by_block: Tensor
    totals: Tensor

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> Queues:
        """The queues of [B, S, k] int64."""
        experts = experts.contiguous()
        batch, tokens, k = experts.shape
        kernels = kernels_of(QueuesShape(experts=num_experts, k=k), experts)
        blocks = kernels.blocks(tokens)
        by_block = experts.new_empty((batch * k, num_experts, *blocks), dtype=torch.int32)
        totals = experts.new_empty((batch, k, num_experts))
        kernels.launch("count", (by_block.shape[0] * by_block.shape[2],), experts, by_block, tokens, *blocks)
        kernels.launch("scan", (batch * k, *kernels.blocks(num_experts, "BLOCK_E")), by_block, totals, *blocks)
        return cls(kernels, experts, by_block, totals)

    @classmethod
    def single(cls, experts: Tensor, num_experts: int) -> Queues:
        """One queue of all choices, in the order of their tokens."""
        return cls.of(experts.contiguous().view(1, -1, 1), num_experts)

    def keep(self, starts: Tensor, capacity: int) -> Tensor:
        """Experts, −1 where the queue index reaches the capacity; a queue's indices begin at starts [B, 1, k, E]."""
        out = torch.empty_like(self.experts)
        self._launch("keep", starts.contiguous(), out, last=(capacity,))
        return out

    def positions(self, shape: torch.Size, places: int | None = None) -> Tensor:
        """The row of each choice, as `shape`, for one queue of all choices; with `places`, that many per expert.

        −1 for a choice of −1, and for a choice beyond its expert's places.
        """
        positions = torch.empty_like(self.experts)
        if places is None:
            self._launch("rank", self.totals, positions)
        else:
            self._launch("place", positions, last=(places,))
        return positions.view(shape)

    def _launch(self, kernel: str, *tensors: Tensor, last: tuple[int, ...] = ()) -> None:
        """Launches one program for each block of each queue."""
        queues, _, blocks = self.by_block.shape
        arguments = (self.experts, self.by_block, *tensors, self.experts.shape[1], blocks, *last)
        self.kernels.launch(kernel, (queues * blocks,), *arguments)

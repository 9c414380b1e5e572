"""State of one step over several micro-batches, common to all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moec.runtime.weights.gathered_again import Again
from moec.runtime.weights.gradients import Bucket

if TYPE_CHECKING:
    from moec.runtime.weights.weights import Weights


class Microbatches:
    """What the layers of a model share: the step's micro-batches, and the collectives that run ahead of their use."""

    def __init__(self) -> None:
        self.sums = True
        """Whether backward sums gradients over ranks: all but the passes of a step before its last, which collect."""
        self.keeps = False
        """Whether gathered weights serve all forward passes until the end of the step."""
        self.pending: dict[Weights, None] = {}
        """The layers with collected gradients, in the order of backward."""
        self.scattering: Sequence[Bucket] = ()
        """The last reduce_scatters: the next ones wait for them, so that one layer's whole gradients are in flight."""
        self.last_use: Again | None = None
        """The last use of a layer in this forward pass whose weights backward gathers again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Microbatches:
        return Microbatches()  # a copy of a model belongs to no open step

    def finish(self) -> None:
        """Sums the remaining collected gradients: of layers that the last backward skipped, or frozen parameters."""
        begun = [(weights, *weights.begin_collected()) for weights in self.pending if weights.has_collected]
        for weights, results, buckets in begun:
            weights.add_to_parameters(results, buckets)

    def drop(self) -> None:
        """Drops the collected gradients of a step."""
        self.sums, self.scattering = True, ()
        for weights in self.pending:
            weights.forget()
        self.pending.clear()

    def drop_finished(self) -> None:
        """Drops reduce_scatters that were waited for, whose results would stay in memory."""
        self.scattering = [bucket for bucket in self.scattering if bucket.is_running]

    def wait_scattered(self) -> None:
        """Waits for the reduce_scatters of the layer before."""
        before, self.scattering = self.scattering, ()
        for bucket in before:
            bucket.wait_scattered()


@dataclass(frozen=True, slots=True)
class Collected:
    """Summed gradients of earlier micro-batches, and which parameters needed one in any of them.

    `fresh`: of each gradient, whether nothing else refers to it, so that the next one is added in place. Autograd may
    refer to a gradient that it gave, but not to the wide copy of a narrow one, nor to a sum.
    """

    gradients: list[Tensor | None]
    needed: tuple[bool, ...]
    device: torch.device
    fresh: Sequence[bool]

    def plus(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds another micro-batch's gradients, in place where that is safe. Call it once."""
        return [_added(*each) for each in zip(self.gradients, gradients, self.fresh, strict=True)]

    def fresh_sums(self, gradients: Sequence[Tensor | None], fresh: Sequence[bool]) -> list[bool]:
        """Of each result of `plus`, whether nothing else refers to it; `fresh`: of each of `gradients`."""
        pairs = zip(self.gradients, gradients, self.fresh, fresh, strict=True)
        return [one if b is None else other if a is None else True for a, b, one, other in pairs]


def _added(one: Tensor | None, other: Tensor | None, in_place: bool) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one.add_(other) if in_place else one + other

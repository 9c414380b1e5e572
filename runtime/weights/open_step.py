"""The state of the open step, which all layers of a model share, and gradients collected over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moec.runtime.errors import JobError
from moec.runtime.refused_derivatives import in_transform
from moec.runtime.weights.gradients import Bucket
from moec.runtime.weights.guests import Guests
from moec.runtime.weights.regathering import RegatheredWeights

if TYPE_CHECKING:
    from moec.runtime.weights.weights import Weights


class OpenStep:
    """The state of the open step: its collected gradients, and the collectives that run ahead of their use."""

    def __init__(self, *, in_pipeline: bool = False) -> None:
        self._in_pipeline = in_pipeline
        self.sums = True
        """Whether a backward pass sums gradients over ranks. In a step those before the last collect them instead."""
        self.adds_collected = False
        """Whether a backward pass is the step's last, which adds the collected gradients to its own before the sum."""
        self.has_several_passes = False
        """Whether the step has several forward passes."""
        self.keeps_weights = False
        """Whether later forward passes of the step may use the weights that the first one has gathered or cast."""
        self.pending: dict[Weights, None] = {}
        """The layers with collected gradients, in the order of backward."""
        self.scattering: Sequence[Bucket] = ()
        """The last layer's reduce_scatters. The next layer waits for them: one layer's gradients are in flight."""
        self.last_use: RegatheredWeights | None = None
        """The last use of a layer in this forward pass whose weights backward gathers again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenStep:
        return OpenStep(in_pipeline=self._in_pipeline)  # a copy of a model belongs to no open step

    def keeps(self, *, gathers: bool) -> bool:
        """Whether the weights of this pass are kept until the end of the step, for its later passes.

        Gathered weights are. Weights that are only cast are kept in a pipeline: it has several micro-batches in flight.
        """
        is_plain = not (torch.is_inference_mode_enabled() or in_transform())
        return self.keeps_weights and (gathers or self._in_pipeline) and is_plain

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """The block is the backward pass of a micro-batch. Other backward passes inside of a step, such as
        `torch.autograd.grad` in a loss function, sum what they compute, and nothing else."""
        self.sums = self.adds_collected = is_last
        try:
            yield
        finally:
            self.sums, self.adds_collected = True, False

    def finish(self) -> None:
        """Sums the remaining collected gradients.

        They are of layers that the last backward skipped, or of which the script froze or unfroze a parameter between
        micro-batches.
        """
        sums = [(weights, *weights.begin_collected()) for weights in self.pending if weights.has_collected]
        for weights, results, buckets in sums:
            weights.add_to_parameters(results, buckets)

    def drop(self) -> None:
        """Drops the collected gradients of a step."""
        self.sums, self.scattering = True, ()
        for weights in self.pending:
            weights.drop_collected()
        self.pending.clear()

    def drop_finished(self) -> None:
        """Drops finished reduce_scatters, to free their results."""
        self.scattering = [bucket for bucket in self.scattering if bucket.is_running]

    def wait_scattered(self) -> None:
        """Waits for the reduce_scatters of the layer before."""
        scattering, self.scattering = self.scattering, ()
        for bucket in scattering:
            bucket.wait_scattered()


@dataclass(frozen=True, slots=True)
class CollectedGradients:
    """Sums of the gradients of earlier micro-batches, for these `parameters` (weak references) and `guests`.

    `needed`: for each parameter, whether a micro-batch needed its gradient. `exclusive`: for each gradient, whether no
    other code refers to it, so that the next one is added in place. Autograd may still refer to a gradient that it
    passed to backward, but neither to an fp32 copy of a narrower gradient nor to a sum.
    """

    gradients: list[Tensor | None]
    needed: tuple[bool, ...]
    parameters: Sequence[Callable[[], Tensor | None]]
    guests: Guests | None
    device: torch.device
    exclusive: Sequence[bool]

    def require_for(self, parameters: Sequence[Callable[[], Tensor | None]], guests: Guests | None, site: str) -> None:
        """Raises `JobError` if they are of other tensors, replaced ones or those of a `functional_call`, or guests."""
        if self.guests is not guests:
            raise JobError(
                "MOE0713",
                f"micro-batches of one step ran {site} in training and in evaluation, or with other guests, and needed "
                "its gradients",
                "change `train()` and `eval()` between steps",
            )
        if [id(collected()) for collected in self.parameters] != [id(parameter()) for parameter in parameters]:
            raise JobError(
                "MOE0713",
                f"a parameter of {site} was replaced, parametrized or given a hook between the micro-batches of a "
                "step, whose gradients are summed at its end",
                "do so between steps, or sum each micro-batch's gradients: `with job.accumulate(…)`",
            )

    def plus(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds another micro-batch's gradients, in place where that is safe. Call it once."""
        return [_sum(*operands) for operands in zip(self.gradients, gradients, self.exclusive, strict=True)]

    def exclusive_sums(self, gradients: Sequence[Tensor | None], exclusive: Sequence[bool]) -> list[bool]:
        """`exclusive` of each result of `plus`; `exclusive` is given for each of `gradients`."""
        pairs = zip(self.gradients, gradients, self.exclusive, exclusive, strict=True)
        return [first if b is None else second if a is None else True for a, b, first, second in pairs]


def _sum(a: Tensor | None, b: Tensor | None, in_place: bool) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a.add_(b) if in_place else a + b

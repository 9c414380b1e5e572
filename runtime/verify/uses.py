"""The part of a value's gradient that each of its consumers adds, in a plan and in the reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moec.passes.ir.ops import Collective
from moec.runtime.verify.lockstep import Lockstep, Step

Origin = tuple[str, str]
"""A value of the lowered Program: the path of the module, and the value's name there."""


class Uses:
    """Of a plan's recorded run and its reference's, after both have gone backward.

    An op is called the same in both, and what a plan adds, conversions, stand for all that consume their results.
    """

    def __init__(self, whole: Lockstep, plan: Lockstep, origins: Mapping[tuple[str, str], Origin]) -> None:
        """`origins`: what each node of the reference is."""
        self._wanted: dict[tuple[str, str, Origin], Tensor | None] = {}
        for (path, consumer, used), (value,) in whole.uses.items():
            if (path, used) in origins and isinstance(value, Tensor):
                self._wanted[path, consumer, origins[path, used]] = value.grad if value.requires_grad else None
        self._parts = plan.uses
        self._consumers: dict[tuple[str, str], list[Step]] = {}
        for step in plan.steps or ():
            for name in dict.fromkeys(step.used):
                self._consumers.setdefault((step.path, name), []).append(step)

    def contributing(self, step: Step, origin: Origin) -> list[Step]:
        """What uses a step's value in its module and adds to its gradient, or should; a single consumer always does."""
        consumers = self._consumers.get((step.path, step.key), [])
        if len(consumers) < 2:
            return consumers
        return [c for c in consumers if self.part(c, step) is not None or _nonzero(self.expected_of(c, step, origin))]

    def part(self, consumer: Step, step: Step) -> list[Tensor] | None:
        """What a consumer adds to the gradient of a step's value on each rank; None where it adds nothing."""
        views = self._parts.get((step.path, consumer.key, step.key), ())
        if not any(isinstance(view, Tensor) and view.requires_grad and view.grad is not None for view in views):
            return None
        return [torch.zeros_like(view) if view.grad is None else view.grad for view in views]

    def expected(self, step: Step, origin: Origin) -> Tensor | None:
        """The whole gradient that all consumers of a step's value should add; None where that is not known."""
        parts = [
            self.expected_of(consumer, step, origin) for consumer in self._consumers.get((step.path, step.key), ())
        ]
        known = [part for part in parts if part is not None]
        return torch.stack(known).sum(0) if known and len(known) == len(parts) else None

    def expected_of(self, consumer: Step, step: Step, origin: Origin) -> Tensor | None:
        """What one consumer should add; None where that is not known."""
        if isinstance(consumer.op, Collective):
            return self.expected(consumer, origin)
        return self._wanted.get((step.path, consumer.key, origin))


def _nonzero(part: Tensor | None) -> bool:
    return part is not None and bool(part.any())

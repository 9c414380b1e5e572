"""The part of a value's gradient from each of its consumers, in a plan and in the reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moec.passes.ir.ops import Conversion
from moec.runtime.verify.cluster.lockstep import Lockstep
from moec.runtime.verify.cluster.recorded import RecordedNode

ReferenceValue = tuple[str, str]
"""A value of the lowered Program: the path of the module, and the value's name there."""


NodeKey = tuple[str, str]
"""A recorded node: the path of its module, and its key there."""


class Uses:
    """Compares the recorded runs of a plan and of its reference, after both backward passes.

    Ops have the same names in both. A conversion, which only plans have, stands for all consumers of its result.
    """

    def __init__(self, reference: Lockstep, plan: Lockstep, references: Mapping[NodeKey, ReferenceValue]) -> None:
        """`references`: the Program's value of each node of the reference."""
        self._expected: dict[tuple[str, str, ReferenceValue], Tensor | None] = {}
        for (path, consumer, used), (value,) in reference.uses.items():
            if (path, used) in references and isinstance(value, Tensor):
                self._expected[path, consumer, references[path, used]] = value.grad if value.requires_grad else None
        self._parts = plan.uses
        self._consumers: dict[NodeKey, list[RecordedNode]] = {}
        for node in plan.nodes or ():
            for name in dict.fromkeys(node.used):
                self._consumers.setdefault((node.path, name), []).append(node)

    def set_expected_part(self, consumer: RecordedNode, reference_value: ReferenceValue, part: Tensor | None) -> None:
        """Sets what a node that only the plan has adds to the gradient of a value."""
        self._expected[consumer.path, consumer.key, reference_value] = part

    def contributing(self, node: RecordedNode, reference_value: ReferenceValue) -> list[RecordedNode]:
        """The consumers that add to the gradient of a node's value in either run; a single one always counts."""
        consumers = self._consumers.get((node.path, node.key), [])
        if len(consumers) < 2:
            return consumers
        return [consumer for consumer in consumers if self._contributes(consumer, node, reference_value)]

    def _contributes(self, consumer: RecordedNode, node: RecordedNode, reference_value: ReferenceValue) -> bool:
        expected = self.expected_of(consumer, node, reference_value)
        return self.part(consumer, node) is not None or (expected is not None and bool(expected.any()))

    def part(self, consumer: RecordedNode, node: RecordedNode) -> list[Tensor] | None:
        """A consumer's part of the gradient of a node's value on each rank; None if it has none."""
        views = self._parts.get((node.path, consumer.key, node.key), ())
        if not any(isinstance(view, Tensor) and view.requires_grad and view.grad is not None for view in views):
            return None
        return [torch.zeros_like(view) if view.grad is None else view.grad for view in views]

    def expected(self, node: RecordedNode, reference_value: ReferenceValue) -> Tensor | None:
        """The reference's gradient of a node's value over all consumers; None if unknown."""
        parts = [
            self.expected_of(consumer, node, reference_value)
            for consumer in self._consumers.get((node.path, node.key), ())
        ]
        known = [part for part in parts if part is not None]
        return torch.stack(known).sum(0) if known and len(known) == len(parts) else None

    def expected_of(self, consumer: RecordedNode, node: RecordedNode, reference_value: ReferenceValue) -> Tensor | None:
        """The reference's gradient from one consumer; None if unknown."""
        if isinstance(consumer.op, Conversion):
            return self.expected(consumer, reference_value)
        return self._expected.get((node.path, consumer.key, reference_value))

"""Reference values for the ops of a loss over a sharded vocabulary, which only plans contain.

The reference has one `cross_entropy` where such a plan has ops for the sums of exponentials and for the labels' logits
(`passes/place/tensor_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moec.passes.ir import Block, Program, Role
from moec.passes.ir.ops import CrossEntropyOfSums, LabelLogit, LogitMax, SumExp, Widen
from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.verify.cluster.recorded import RecordedNode
from moec.runtime.verify.cluster.uses import ReferenceValue

BLOCK = "loss"
_INPUTS: tuple[Role, ...] = ("logits", "labels")


@dataclass(frozen=True, slots=True)
class ShardedLoss:
    """The values of a plan's loss over a sharded vocabulary, from the reference's logits `[batch, sequence, vocab]`.

    `logits_of`: a copy of the logits for each class of op that reads them and adds to their gradient. `total` is
    computed from these values; `reference` is the reference's own result, whose gradient they get.
    """

    values: Mapping[ReferenceValue, Tensor]
    logits_of: Mapping[Any, Tensor]
    total: Tensor
    reference: Tensor

    def differentiate(self) -> None:
        """Gives gradients to the values and to the copies of the logits, from the gradient of `reference`."""
        self.total.backward(self.reference.grad)  # type: ignore[no-untyped-call]

    def parts(self, nodes: Sequence[RecordedNode]) -> Iterator[tuple[RecordedNode, ReferenceValue, Tensor | None]]:
        """For each node of the plan that reads the logits: the value that it reads, and its part of their gradient."""
        for node in nodes:
            if node.path == f"{BLOCK}." and type(node.op) in self.logits_of and node.op is not None:
                logits = node.op.operands[0]
                if logits in node.used:
                    yield node, (node.path, logits), self.logits_of[type(node.op)].grad


def sharded_loss(plan: Program, computed: Mapping[ReferenceValue, Tensor]) -> ShardedLoss | None:
    """The values from what the reference computed; None where no vocabulary is sharded, or a name is not the plan's."""
    block, path = plan.block_map.get(BLOCK), f"{BLOCK}."
    named = {type(op): op.results[0].name for op in block.ops} if block is not None else {}
    if block is None or not {LogitMax, SumExp, LabelLogit, CrossEntropyOfSums} <= named.keys():
        return None
    logits, labels = (_input(block, role, computed) for role in _INPUTS)
    reference = computed.get((path, named[CrossEntropyOfSums]))
    if logits is None or labels is None or reference is None:
        return None
    leaf = logits.detach().clone().requires_grad_()
    logits_of: dict[Any, Tensor] = {kind: leaf.clone() for kind in (SumExp, LabelLogit)}
    largest, valid = logits.detach().amax(-1), labels != IGNORED_LABEL
    sums = (logits_of[SumExp] - largest[..., None]).exp().sum(-1)
    label_logit = logits_of[LabelLogit].gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid
    for value in (sums, label_logit, *logits_of.values()):
        value.retain_grad()
    values: dict[Any, Tensor] = {LogitMax: largest, SumExp: sums, LabelLogit: label_logit, Widen: leaf}
    by_name = {(path, named[kind]): value for kind, value in values.items() if kind in named}
    total = ((sums.log() + largest - label_logit) * valid).sum()
    return ShardedLoss(by_name, logits_of, total, reference)


def _input(block: Block, role: Role, computed: Mapping[ReferenceValue, Tensor]) -> Tensor | None:
    value = block.input(role)
    return None if value is None else computed.get((f"{BLOCK}.", value.name))

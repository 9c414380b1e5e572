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
class LossInParts:
    """The values of a plan's loss over a sharded vocabulary, from the reference's logits `[batch, sequence, vocab]`.

    `read` are copies of the logits, one for each op that reads them and adds to their gradient, by the op's class.
    """

    values: Mapping[ReferenceValue, Tensor]
    read: Mapping[Any, Tensor]
    total: Tensor
    whole: Tensor

    def differentiate(self) -> None:
        """Gives gradients to the values and to the copies, from that of `whole`, the reference's `total`."""
        self.total.backward(self.whole.grad)  # type: ignore[no-untyped-call]

    def parts(self, steps: Sequence[RecordedNode]) -> Iterator[tuple[RecordedNode, ReferenceValue, Tensor | None]]:
        """For each step of the plan that reads the logits: what it reads, and its part of their gradient."""
        for step in steps:
            if step.path == f"{BLOCK}." and type(step.op) in self.read and step.op is not None:
                logits = step.op.operands[0]
                if logits in step.used:
                    yield step, (step.path, logits), self.read[type(step.op)].grad


def loss_in_parts(plan: Program, computed: Mapping[ReferenceValue, Tensor]) -> LossInParts | None:
    """The values from what the reference computed; None where no vocabulary is sharded, or a name is not the plan's."""
    block, path = plan.block_map.get(BLOCK), f"{BLOCK}."
    named = {type(op): op.results[0].name for op in block.ops} if block is not None else {}
    if block is None or not {LogitMax, SumExp, LabelLogit, CrossEntropyOfSums} <= named.keys():
        return None
    logits, labels = (_given(block, role, computed) for role in _INPUTS)
    whole = computed.get((path, named[CrossEntropyOfSums]))
    if logits is None or labels is None or whole is None:
        return None
    wide = logits.detach().clone().requires_grad_()
    read: dict[Any, Tensor] = {kind: wide.clone() for kind in (SumExp, LabelLogit)}
    largest, valid = logits.detach().amax(-1), labels != IGNORED_LABEL
    sums = (read[SumExp] - largest[..., None]).exp().sum(-1)
    label_logit = read[LabelLogit].gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid
    for value in (sums, label_logit, *read.values()):
        value.retain_grad()
    found: dict[Any, Tensor] = {LogitMax: largest, SumExp: sums, LabelLogit: label_logit, Widen: wide}
    values = {(path, named[kind]): value for kind, value in found.items() if kind in named}
    total = ((sums.log() + largest - label_logit) * valid).sum()
    return LossInParts(values, read, total, whole)


def _given(block: Block, role: Role, computed: Mapping[ReferenceValue, Tensor]) -> Tensor | None:
    value = block.input(role)
    return None if value is None else computed.get((f"{BLOCK}.", value.name))

"""The messages between pipeline stages in a step or an evaluation: what a stage hands on (`HANDED_ON`), and back its
gradients."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moec.codegen.emit import DTYPES
from moec.codegen.plan import Plan
from moec.passes.ir import REPLICATED, Role, Value
from moec.passes.ir.interface import HANDED_ON, forwards
from moec.passes.ir.limits import MAX_STAGES
from moec.runtime.ranks.groups import PIPELINE, begin_messages, end_messages
from moec.runtime.ranks.verdict import MESSAGE
from moec.runtime.ranks.watch import collective

StageBatch = tuple[int, int]
"""A stage and a micro-batch."""
Values = dict[Role, Tensor]


IN_FLIGHT = 4
"""The most tensors of a rank that are on the way: they stay in memory until they are received."""


class _Arriving(NamedTuple):
    """Tensors that are being received. `ranks`: the sender and this one."""

    values: Values
    works: Sequence[dist.Work]
    ranks: tuple[int, ...]


class _Sent(NamedTuple):
    """A tensor that is being sent. `ranks`: this one and the receiver."""

    work: dist.Work
    tensor: Tensor
    site: str
    ranks: tuple[int, ...]


class StageMessages:
    """The messages of `rank` in one step or evaluation. `job` is the prefix of its groups' names."""

    def __init__(self, plan: Plan, rank: int, job: str, device: torch.device) -> None:
        begin_messages(job)
        self._plan, self._rank, self._job, self._device = plan, rank, job, device
        self._rank_of = {stage: rank for rank, stages in enumerate(plan.program.stages_by_rank) for stage in stages}
        self._inputs = [
            {value.role: value for value in forward.inputs if value.role in HANDED_ON}
            for forward in forwards(plan.program)
        ]
        self._arriving: dict[tuple[StageBatch, bool], _Arriving] = {}
        self._sent = deque[_Sent]()
        """Sends that may still run, the oldest first."""
        self._at_hand: dict[tuple[StageBatch, bool], Values] = {}
        """What a stage has sent to another one of this rank."""

    def receive(self, place: StageBatch, tokens: Tensor, *, gradients: bool = False) -> None:
        """Begins to receive what the previous stage hands on to the stage of `place`, or the gradients of what that
        stage has sent. `tokens`: those of the micro-batch."""
        if (place, gradients) in self._at_hand:
            return
        stage, _ = place
        sender = stage + 1 if gradients else stage - 1
        taken = self._inputs[max(stage, sender)]  # of the later of the two stages
        values = {
            role: torch.empty(self._shape(value, tokens), dtype=DTYPES[str(value.dtype)], device=self._device)
            for role, value in taken.items()
            if role is not None and not (gradients and value.dtype == "int64")
        }
        site, works, ranks = _site(place, gradients=gradients), [], self._ranks(sender, stage)
        with collective(MESSAGE, self._job + PIPELINE, site, begins=False, ranks=ranks) as peers:
            for index, value in enumerate(values.values()):
                tag = _tag(place, index, gradients=gradients)
                works.append(dist.irecv(value, group=peers, group_src=self._rank_of[sender], tag=tag))
        self._arriving[place, gradients] = _Arriving(values, [work for work in works if work is not None], ranks)

    def send(self, place: StageBatch, values: Mapping[Role, Tensor], *, gradients: bool = False) -> None:
        """Sends what `place` hands on to the next stage, or the gradients of what it has received to the one before."""
        stage, microbatch = place
        receiver = stage - 1 if gradients else stage + 1
        there = receiver, microbatch
        if self._rank_of[receiver] == self._rank_of[stage]:
            self._at_hand[there, gradients] = {role: value.detach() for role, value in values.items()}
            return
        site, ranks = _site(there, gradients=gradients), self._ranks(stage, receiver)
        with collective(MESSAGE, self._job + PIPELINE, site, ranks=ranks) as peers:
            for index, value in enumerate(values.values()):
                while len(self._sent) >= IN_FLIGHT:  # ends: orders in which ranks wait for each other are refused
                    self._wait_for_oldest()
                sent = value.detach().contiguous()
                tag = _tag(there, index, gradients=gradients)
                work = dist.isend(sent, group=peers, group_dst=self._rank_of[receiver], tag=tag)
                if work is not None:
                    self._sent.append(_Sent(work, sent, site, ranks))

    def received(self, place: StageBatch, *, gradients: bool = False) -> Values:
        """Waits for what the other stage sends, and returns it."""
        if (values := self._at_hand.pop((place, gradients), None)) is not None:
            return values
        arriving = self._arriving.pop((place, gradients))
        with collective(MESSAGE, self._job + PIPELINE, _site(place, gradients=gradients), ranks=arriving.ranks):
            for work in arriving.works:
                work.wait()
        return arriving.values

    def finish(self) -> None:
        """Waits until everything is sent."""
        while self._sent:
            self._wait_for_oldest()
        end_messages(self._job)

    def _wait_for_oldest(self) -> None:
        sent = self._sent.popleft()
        with collective(MESSAGE, self._job + PIPELINE, sent.site, begins=False, ranks=sent.ranks):
            sent.work.wait()

    def _ranks(self, sender: int, receiver: int) -> tuple[int, ...]:
        """The ranks in the job that run two stages of this pipeline."""
        size, rank_in_stage = self._plan.stage_size, self._rank % self._plan.stage_size
        return tuple(self._rank_of[stage] * size + rank_in_stage for stage in (sender, receiver))

    def _shape(self, value: Value, tokens: Tensor) -> list[int]:
        """The shape on this rank of a value between two stages."""
        length = self._plan.spec.model.length  # of images: the number of patches, not a size of `tokens`
        sizes = {"batch": tokens.shape[0], "sequence": length or tokens.shape[-1], "data_ranks": self._plan.data_size}
        layout, dense = value.layout or REPLICATED, self._plan.meshes["dense"]
        shape = []
        for dim, size in enumerate(value.shape):
            # A rank's tokens are its part of the batch.
            ranks = math.prod(dense.size(axis) for axis in layout.cuts(dim) if size != "batch")
            shape.append((sizes[size] if isinstance(size, str) else size) // ranks)
        return shape


def _site(place: StageBatch, *, gradients: bool) -> str:
    values = "gradients" if gradients else "values"
    return f"{values} for stage {place[0]}, micro-batch {place[1]}"


def _tag(place: StageBatch, index: int, *, gradients: bool) -> int:
    """A number that no other tensor of the step has in this direction."""
    stage, microbatch = place
    return 2 * len(HANDED_ON) * (microbatch * MAX_STAGES + stage) + len(HANDED_ON) * gradients + index

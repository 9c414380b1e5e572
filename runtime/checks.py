"""What ranks check in each forward pass, and how they agree on an error before any rank waits for another.

Checks that wait for the device are made in every pass, in the first of its kind, or never (`moec.launch(checks=…)`).
What needs no device is always checked: the dtypes and shapes of a batch, and on CPU everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.batches import fingerprint
from moec.runtime.groups import HOST
from moec.runtime.watch import collective

MODES = ("all", "first", "none")
MAX_COMPLAINT = 1000
"""Bytes of a complaint that travel to the other ranks."""


class Alike(NamedTuple):
    """Numbers below 2^63 that must be the same on every rank, and what to say where they are not.

    `{least}` and `{most}` in the words stand for the smallest and the largest of each.
    """

    words: str
    numbers: tuple[int, ...]


def _difference(alike: Sequence[Alike], least: Sequence[int], most: Sequence[int]) -> str | None:
    """The words of the first that differs between ranks, if any does."""
    start = 0
    for each in alike:
        stop = start + len(each.numbers)
        if least[start:stop] != most[start:stop]:
            return each.words.format(least=list(least[start:stop]), most=list(most[start:stop]))
        start = stop
    return None


class Checks:
    """How one rank checks what a model is given, alone."""

    compares = False
    """Whether there are ranks to compare with."""

    def __init__(self, mode: str = "all") -> None:
        if mode not in MODES:
            raise ValueError(f"checks is one of {', '.join(map(repr, MODES))}, not {mode!r}")
        self.mode = mode

    def __deepcopy__(self, memo: dict[int, Any]) -> Checks:
        return self  # a copied model runs in the same job

    def looks(self, seen: set[object], kind: object, device: torch.device) -> bool:
        """Whether tensors' values are checked in this pass; `seen` holds the kinds of pass that the model has had.

        The same on every rank if `kind` is.
        """
        first = kind not in seen
        seen.add(kind)
        if self.mode == "none":
            return False
        return self.mode == "all" or first or device.type == "cpu"

    def agree(self, site: str, complaint: str | None, *alike: Alike) -> str | None:
        """Gives every rank the complaint of the lowest rank that has one, else what differs between them, or None."""
        return complaint

    def same_tokens(self, *ids: Tensor | None) -> str | None:
        """A complaint unless the ranks that share sequences were given the same ones."""
        return None


class JobChecks(Checks):
    """How the ranks of a job check together. `place` says where this rank is, such as "rank 3, step 5"."""

    def __init__(
        self, mode: str, job: str, rank: int, world_size: int, tensor_parallel: int, place: Callable[[], str]
    ) -> None:
        super().__init__(mode)
        self.rank = rank
        self._job, self._world_size, self._place = job, world_size, place
        self._tensor_parallel = tensor_parallel
        self.compares = world_size > 1 and mode != "none"

    def agree(self, site: str, complaint: str | None, *alike: Alike) -> str | None:
        """One small all_reduce tells every rank whether any complains; the lowest such rank broadcasts its words.

        The same all_reduce finds numbers that differ between ranks.
        """
        if complaint:
            place = self._place()
            complaint = f"{place}: {complaint}" if place else complaint
        if not self.compares:
            return complaint
        bounds = [bound for each in alike for number in each.numbers for bound in (number, -number)]
        lowest = torch.tensor([self.rank if complaint else self._world_size, *bounds])
        with collective("all_reduce", self._job + HOST, site) as peers:
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=peers)
        speaker, *bounds = lowest.tolist()
        if speaker == self._world_size:
            return _difference(alike, bounds[::2], [-bound for bound in bounds[1::2]])
        return self._broadcast(complaint or "", speaker)

    def same_tokens(self, *ids: Tensor | None) -> str | None:
        if self._tensor_parallel == 1:
            return None
        device = next(tensor.device for tensor in ids if tensor is not None)
        own = fingerprint(ids)
        bounds = torch.tensor([own, -own], device=device)
        with collective("all_reduce", f"{self._job}tp", "comparing the tokens of a tp group") as peers:
            dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=peers)
        least, most = bounds.tolist()
        if least == -most:
            return None
        return "the ranks of its tp group were given other tokens or labels: they share `job.data_rank`"

    def _broadcast(self, text: str, source: int) -> str:
        buffer = torch.zeros(MAX_COMPLAINT, dtype=torch.uint8)
        encoded = list(text.encode()[:MAX_COMPLAINT])
        buffer[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
        with collective("broadcast", self._job + HOST, "a complaint") as peers:
            dist.broadcast(buffer, source, group=peers)
        return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace")

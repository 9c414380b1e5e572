"""What ranks check of what a model is given, and how all of them raise the same error before any waits for another.

Checks that wait for the device are made in every pass, in the first of its kind, or never (`moec.launch(checks=…)`).
What needs no device is always checked: the dtypes and shapes of a batch, and on CPU everything.

Ranks agree by one sum of a few numbers. Each rank multiplies the numbers that must be alike by a factor of its own, and
all ranks' factors add up to 0: the sum is 0 if the numbers are alike, and almost surely not otherwise. Only where the
sum says that something is wrong do ranks send each other words.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.batches import fingerprint
from moec.runtime.errors import JobError
from moec.runtime.groups import HOST
from moec.runtime.watch import collective

MODES = ("all", "first", "none")
MOST_COUNTS = 2
MAX_WORDS = 1000
"""Characters of a complaint that travel to the other ranks."""
MAX_BYTES = 8192
"""What one rank tells the others of an error, as JSON."""

SITES = "ranks do not run the same: one is at the {least}, another at the {most}"
OTHER_TOKENS = "ranks {one} and {other} share `job.data_rank`, and were given other tokens, labels or inputs"


class Complaint(NamedTuple):
    """A mistake that one rank has found, to be raised on all of them."""

    code: str
    words: str
    help: str = ""


class Alike(NamedTuple):
    """Numbers below 2^63 that must be the same on every rank, and what to say where they are not.

    `{least}` and `{most}` in the words stand for the smallest and the largest.
    """

    code: str
    words: str
    numbers: tuple[int, ...]


class Shared(NamedTuple):
    """What ranks that share sequences must have alike: tensors of the same shapes and, with `look`, values."""

    tensors: tuple[Tensor | None, ...]
    look: bool


class Checks:
    """How one rank checks what a model is given, alone. `place` says where it is, such as "rank 3, step 5"."""

    compares = False
    """Whether there are ranks to compare with."""

    def __init__(self, mode: str = "all", place: Callable[[], str] = str) -> None:
        if mode not in MODES:
            raise ValueError(f"checks is one of {', '.join(map(repr, MODES))}, not {mode!r}")
        self.mode, self.place = mode, place

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

    def require(
        self,
        site: str,
        complaint: Complaint | None,
        *alike: Alike,
        shared: Shared | None = None,
        counts: Sequence[int] = (),
    ) -> list[int]:
        """Raises `JobError`, alike on every rank, if any complains or ranks differ; gives the sums of their `counts`.

        Every rank comes here, or none.
        """
        if complaint is not None:
            raise JobError(*self._placed(complaint))
        return list(counts)

    def _placed(self, complaint: Complaint) -> Complaint:
        place = self.place()
        return complaint._replace(words=f"{place}: {complaint.words}") if place else complaint


class JobChecks(Checks):
    """How the ranks of a job check together, over its group for CPU tensors.

    `sharing`: the ranks that have the same sequences as this one, itself among them.
    """

    def __init__(
        self, mode: str, job: str, rank: int, world_size: int, sharing: Sequence[int], place: Callable[[], str]
    ) -> None:
        super().__init__(mode, place)
        self._job, self._rank, self._world_size, self._sharing = job, rank, world_size, tuple(sharing)
        self._factors = _factor(rank, range(world_size)), _factor(rank, self._sharing)
        self.compares = world_size > 1

    def require(
        self,
        site: str,
        complaint: Complaint | None,
        *alike: Alike,
        shared: Shared | None = None,
        counts: Sequence[int] = (),
    ) -> list[int]:
        if not self.compares:
            return super().require(site, complaint, counts=counts)
        placed = None if complaint is None else self._placed(complaint)
        own = _Report(site, placed, alike, self._sharing[0], self._fingerprint(shared, complaint))
        of_all, of_sharing = self._factors
        products = map(_signed, (of_all * own.digest(), of_sharing * own.shared))
        room = [0] * (MOST_COUNTS - len(counts))  # ranks that come from different sites send as much
        sums = torch.tensor([complaint is not None, *products, *counts, *room], dtype=torch.int64)
        with collective("all_reduce", self._job + HOST, site) as peers:
            dist.all_reduce(sums, group=peers)
        complaints, all_differ, sharing_differ, *totals = sums.tolist()
        if complaints or all_differ or sharing_differ:
            raise self._explain(own)
        return totals

    def _fingerprint(self, shared: Shared | None, complaint: Complaint | None) -> int:
        if shared is None or complaint is not None or len(self._sharing) == 1:
            return 0
        return fingerprint(shared.tensors, values=shared.look)

    def _explain(self, own: _Report) -> JobError:
        """What is wrong, now that something is: the complaint of the lowest rank, else what differs. A collective."""
        encoded = own.encode()
        buffer = torch.zeros(MAX_BYTES, dtype=torch.uint8)
        buffer[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        found = [torch.empty_like(buffer) for _ in range(self._world_size)]
        with collective("all_gather", self._job + HOST, "an error") as peers:
            dist.all_gather(found, buffer, group=peers)
        reports = [_Report.decode(each.numpy().tobytes().rstrip(b"\0")) for each in found]
        wrong = next((report.complaint for report in reports if report.complaint), None)
        return JobError(*(wrong or _difference(reports)))


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank brings to an agreement.

    `shared`: a fingerprint of what it has alike with the ranks that share its sequences, of which `first` is the first.
    """

    site: str
    complaint: Complaint | None
    alike: Sequence[Alike]
    first: int
    shared: int

    def digest(self) -> int:
        """A number that almost surely differs where site or numbers do; the same in every process."""
        return hash((zlib.crc32(self.site.encode()), *(each.numbers for each in self.alike)))

    def encode(self) -> bytes:
        complaint = self.complaint and self.complaint._replace(words=self.complaint.words[:MAX_WORDS])
        return json.dumps([self.site, complaint, self.alike, self.first, self.shared], ensure_ascii=False).encode()

    @staticmethod
    def decode(encoded: bytes) -> _Report:
        site, complaint, alike, first, shared = json.loads(encoded)
        alike = [Alike(code, words, tuple(numbers)) for code, words, numbers in alike]
        return _Report(site, complaint and Complaint(*complaint), alike, first, shared)


def _difference(reports: Sequence[_Report]) -> Complaint:
    """What differs between ranks none of which complains: what they run, the first numbers, or shared sequences."""
    sites = sorted({report.site for report in reports})
    if len(sites) > 1:
        return Complaint("MOE0702", SITES.format(least=sites[0], most=sites[-1]))
    for alike in zip(*(report.alike for report in reports), strict=True):
        columns = list(zip(*(each.numbers for each in alike), strict=True))
        least, most = [min(column) for column in columns], [max(column) for column in columns]
        if least != most:
            return Complaint(alike[0].code, alike[0].words.format(least=least, most=most))
    rank, first = next((i, r.first) for i, r in enumerate(reports) if r.shared != reports[r.first].shared)
    return Complaint("MOE0702", OTHER_TOKENS.format(one=first, other=rank))


def _factor(rank: int, ranks: Sequence[int]) -> int:
    """This rank's factor among those of `ranks`, which add up to 0 modulo 2^64: the first makes up for all others."""
    if rank != ranks[0]:
        return _mixed(rank)
    return -sum(map(_mixed, ranks[1:]))


def _mixed(number: int) -> int:
    """An odd number of 64 bits that looks random: SplitMix64 (Steele et al. 2014)."""
    number = (number + 1) * 0x9E3779B97F4A7C15
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = ((number ^ (number >> shift)) * factor) % (1 << 64)
    return (number ^ (number >> 31)) | 1


def _signed(number: int) -> int:
    """`number` modulo 2^64, as an int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)

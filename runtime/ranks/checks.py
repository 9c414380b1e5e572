"""Ranks agree on their inputs: one rank's error is raised on every rank before any rank waits for another.

Dtypes and shapes are always checked. Reading values waits for the device, so `moec.launch(checks=…)` says whether every
pass does, the first of each kind, or none. On CPU "first" checks every pass.

Ranks agree by one all_reduce. Each rank sends the hash of what must match times its rank's factor. All factors add up
to 0 modulo 2^64, so the sum is 0 if the hashes match, and almost surely not 0 otherwise. A second product compares the
ranks that share sequences. Ranks exchange messages only if a sum is not 0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.errors import JobError, require_one_of
from moec.runtime.ranks.fingerprint import fingerprint
from moec.runtime.ranks.groups import HOST
from moec.runtime.ranks.watch import collective
from moec.runtime.script import script_line

MODES = ("all", "first", "none")
MOST_COUNTS = 6
MAX_WORDS = 1000
"""Characters of a complaint that other ranks receive."""
MAX_LINE = 200
"""Characters of a script's path and line that other ranks receive."""
MAX_BYTES = 8192
"""Bytes of JSON that one rank sends about an error."""

SITES = "ranks make different calls: one is at `{least}`, another at `{most}`"
SAME_CALLS = "every rank makes the same calls of a job in the same order, also those that only rank 0 seems to need"
OTHER_TOKENS = "ranks {one} and {other} have the same `job.data_rank`, but different tokens, labels or inputs"


class Complaint(NamedTuple):
    """An error to be raised on every rank. Its message gets the rank's number, unless the error `is_on_all_ranks`."""

    code: str
    message: str
    help: str = ""
    is_on_all_ranks: bool = False

    @staticmethod
    def of(error: DiagnosticError, *, is_on_all_ranks: bool = False) -> Complaint:
        """The code and message of `error`."""
        first = error.diagnostics[0]
        return Complaint(first.code, first.message, first.help or "", is_on_all_ranks)

    def error(self) -> JobError:
        """The error to raise."""
        return JobError(self.code, self.message, self.help)


class MustMatch(NamedTuple):
    """Numbers that must be equal on all ranks, and the message if they are not.

    In `message`, `{least}` and `{most}` stand for the minimum and maximum of each number over the ranks, `{one}` and
    `{other}` for the first ranks that have the minimum and the maximum of the first number that differs. `in_stage`:
    only ranks of the same pipeline stages must have equal numbers.
    """

    code: str
    message: str
    numbers: tuple[int, ...]
    in_stage: bool = False


class SharedInputs(NamedTuple):
    """Tensors that must be the same on the ranks that share sequences: their shapes, and values with `reads_values`."""

    tensors: tuple[Tensor | None, ...]
    reads_values: bool


class Checks:
    """Checks of a single rank. `place` gives the prefix of a message, such as "rank 3, step 5"."""

    compares = False
    """Whether there is more than one rank."""

    def __init__(self, mode: str = "all", place: Callable[[], str] = str) -> None:
        require_one_of("moec.launch", "checks", mode, MODES)
        self.mode, self.place = mode, place

    def __deepcopy__(self, memo: dict[int, Any]) -> Checks:
        return self  # a copied model runs in the same job

    def reads_values(self, seen: set[object], kind: object, device: torch.device) -> bool:
        """Whether this pass checks tensors' values. `seen` collects the kinds of earlier passes.

        The result is the same on every rank if `kind` is.
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
        *matching: MustMatch,
        inputs: SharedInputs | None = None,
        counts: Sequence[int] = (),
    ) -> list[int]:
        """Raises the same `JobError` on every rank if one has a complaint or ranks differ; returns summed `counts`.

        A collective: every rank calls it, or none.
        """
        if complaint is not None and not complaint.is_on_all_ranks and (place := self.place()):
            complaint = complaint._replace(message=f"{place}: {complaint.message}")
        return self._agree(_Report(site, complaint, matching), inputs, counts)

    def _agree(self, report: _Report, inputs: SharedInputs | None, counts: Sequence[int]) -> list[int]:
        if report.complaint is not None:
            raise report.complaint.error()
        return list(counts)


class JobChecks(Checks):
    """Checks of all ranks of a job, by a collective over the job's group for CPU tensors.

    `reading_ranks`, which read the same part of the batch as this one, must get the same sequences. Each `stage_size`
    ranks have the same pipeline stages.
    """

    def __init__(
        self, mode: str, job: str, rank: int, world_size: int, reading_ranks: Sequence[int], stage_size: int,
        place: Callable[[], str],
    ) -> None:  # fmt: skip
        super().__init__(mode, place)
        self._job, self._world_size, self._stage_size = job, world_size, stage_size
        self._reading_ranks, first = tuple(reading_ranks), rank - rank % stage_size
        groups = range(world_size), self._reading_ranks, range(first, first + stage_size)
        self._factors = [_factor(rank, ranks) for ranks in groups]
        self.compares = world_size > 1

    def _agree(self, report: _Report, inputs: SharedInputs | None, counts: Sequence[int]) -> list[int]:
        if not self.compares:
            return super()._agree(report, inputs, counts)
        report = replace(report, first=self._reading_ranks[0], inputs=self._fingerprint(inputs, report.complaint))
        hashes = report.digest(), report.inputs, report.digest_of_stage()
        products = [_signed(factor * number) for factor, number in zip(self._factors, hashes, strict=True)]
        assert len(counts) <= MOST_COUNTS, f"{report.site} sends {len(counts)} counts"
        room = [0] * (MOST_COUNTS - len(counts))  # every site sends tensors of the same size
        sums = torch.tensor([report.complaint is not None, *products, *counts, *room], dtype=torch.int64, device="cpu")
        with collective("all_reduce", self._job + HOST, report.site) as peers:
            dist.all_reduce(sums, group=peers)
        complaints, ranks_differ, readers_differ, stage_differs, *totals = sums.tolist()
        if complaints or ranks_differ or readers_differ or stage_differs:
            raise self._explain(report)
        return totals[: len(counts)]

    def _fingerprint(self, inputs: SharedInputs | None, complaint: Complaint | None) -> int:
        if inputs is None or complaint is not None or len(self._reading_ranks) == 1:
            return 0
        return fingerprint(inputs.tensors, values=inputs.reads_values)

    def _explain(self, report: _Report) -> JobError:
        """The complaint of the lowest rank that has one, else a difference between ranks. A collective."""
        encoded = replace(report, line=script_line()[-MAX_LINE:]).encode()
        buffer = torch.zeros(MAX_BYTES, dtype=torch.uint8, device="cpu")
        buffer[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        buffers = [torch.empty_like(buffer) for _ in range(self._world_size)]
        with collective("all_gather", self._job + HOST, "an error") as peers:
            dist.all_gather(buffers, buffer, group=peers)
        reports = [_Report.decode(rank_buffer.numpy().tobytes().rstrip(b"\0")) for rank_buffer in buffers]
        wrong = next((report for report in reports if report.complaint), None)
        if wrong is None or wrong.complaint is None:
            return _difference(reports, self._stage_size).error()
        complaint, line = wrong.complaint, wrong.line
        if line == reports[0].line:
            return complaint.error()
        # Rank 0 prints the error, and would show its own line.
        error = complaint._replace(message=f"{complaint.message} (at {line})" if line else complaint.message).error()
        error.elsewhere = True
        return error


@dataclass(frozen=True, slots=True)
class _Report:
    """The report of one rank to the others.

    `inputs`: a fingerprint of its inputs; `first`: the first rank that shares its sequences. `line`: the line of
    its script, in a report of an error.
    """

    site: str
    complaint: Complaint | None
    matching: Sequence[MustMatch]
    first: int = 0
    inputs: int = 0
    line: str = ""

    def digest(self) -> int:
        """A hash of site and numbers, the same in every process."""
        numbers = (claim.numbers for claim in self.matching if not claim.in_stage)
        return hash((zlib.crc32(self.site.encode()), *numbers))

    def digest_of_stage(self) -> int:
        """A hash of the numbers that must be equal in a stage alone."""
        return hash(tuple(claim.numbers for claim in self.matching if claim.in_stage))

    def encode(self) -> bytes:
        """At most `MAX_BYTES` of JSON, with a shorter message where it takes more."""
        for most in (MAX_WORDS, MAX_WORDS // 4, MAX_WORDS // 16):
            complaint = self.complaint
            if complaint is not None:
                complaint = complaint._replace(message=complaint.message[:most], help=complaint.help[:most])
            fields = [self.site, complaint, self.matching, self.first, self.inputs, self.line]
            # A path with bytes that are no text has characters without an encoding.
            encoded = json.dumps(fields, ensure_ascii=False).encode(errors="backslashreplace")
            if len(encoded) <= MAX_BYTES:
                break
        return encoded

    @staticmethod
    def decode(encoded: bytes) -> _Report:
        site, complaint, matching, first, inputs, line = json.loads(encoded)
        matching = [MustMatch(code, words, tuple(numbers), in_stage) for code, words, numbers, in_stage in matching]
        return _Report(site, complaint and Complaint(*complaint), matching, first, inputs, line)


def _difference(reports: Sequence[_Report], stage_size: int) -> Complaint:
    """Describes the first difference between ranks: the site, a number that must match, or inputs of ranks that read
    the same part of the batch. Each `stage_size` ranks are those of the same stages."""
    sites = sorted({report.site for report in reports})
    if len(sites) > 1:
        return Complaint("MOE0702", SITES.format(least=sites[0], most=sites[-1]), SAME_CALLS)
    for claims in zip(*(report.matching for report in reports), strict=True):
        size = stage_size if claims[0].in_stage else len(claims)
        for begin in range(0, len(claims), size):
            if complaint := _difference_of(claims[begin : begin + size], begin):
                return complaint
    rank, first = next((i, r.first) for i, r in enumerate(reports) if r.inputs != reports[r.first].inputs)
    return Complaint("MOE0702", OTHER_TOKENS.format(one=first, other=rank))


def _difference_of(claims: Sequence[MustMatch], first_rank: int) -> Complaint | None:
    """Describes the first number in which consecutive ranks from `first_rank` on differ, or None."""
    columns = list(zip(*(claim.numbers for claim in claims), strict=True))
    least, most = [min(column) for column in columns], [max(column) for column in columns]
    if least == most:
        return None
    ranks = next(column for column in columns if min(column) != max(column))
    one, other = (first_rank + ranks.index(bound) for bound in (min(ranks), max(ranks)))
    return Complaint(claims[0].code, claims[0].message.format(least=least, most=most, one=one, other=other))


def _factor(rank: int, ranks: Sequence[int]) -> int:
    """This rank's factor. The factors of `ranks` add up to 0 modulo 2^64: the first is minus the sum of the others."""
    if rank != ranks[0]:
        return _mixed(rank)
    return -sum(map(_mixed, ranks[1:]))


def _mixed(number: int) -> int:
    """SplitMix64 of a rank (Steele et al. 2014), made odd so that one rank's difference cannot vanish modulo 2^64."""
    number = (number + 1) * 0x9E3779B97F4A7C15
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = ((number ^ (number >> shift)) * factor) % (1 << 64)
    return (number ^ (number >> 31)) | 1


def _signed(number: int) -> int:
    """`number` modulo 2^64, as an int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)

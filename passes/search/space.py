"""What a search may choose: for each word of `parallel`, the values that the file leaves open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from moec.grammar.spec import Spec
from moec.grammar.stated import STAGES_OF_RANK, SharingDegrees, number_of, open_words
from moec.passes.degrees.fitting_degrees import divides
from moec.passes.degrees.schedules import Pipeline, takes
from moec.passes.degrees.stated_degrees import divisors
from moec.passes.ir import Recompute
from moec.passes.search.kinds import Kind, Pair, kinds_of

SCHEDULES = ("one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v", "dual_pipe_v")
"""The schedules among which a search chooses: `gpipe` and `looped_bfs` take as long or longer, with more memory."""

RECOMPUTED: tuple[Recompute, ...] = ("none", "experts", "layer")
ZERO_STAGES = (0, 1, 2, 3)


class Base(NamedTuple):
    """The sizes of a plan's axes but for those of experts, and its micro-batches."""

    pp: int
    cp: int
    tp: int
    microbatches: int


class Sizes(NamedTuple):
    """The sizes of all axes of a plan, and its micro-batches; of several plans an array of each.

    `experts`: `ep` and `etp` of each kind of mixtures.
    """

    pp: Any
    cp: Any
    tp: Any
    microbatches: Any
    experts: Sequence[tuple[Any, Any]]

    @classmethod
    def of(cls, columns: Iterable[Any]) -> Sizes:
        """The sizes of a row, or of the columns of an array with a row for each plan."""
        pp, cp, tp, microbatches, *experts = columns
        return cls(pp, cp, tp, microbatches, tuple(zip(experts[::2], experts[1::2], strict=True)))


class Pipelined(NamedTuple):
    """How the ranks of a pipeline take turns."""

    schedule: str
    virtual: int


@dataclass(frozen=True)
class Space:
    """The values of each word, of a file of a model with `train`. A word that is not open has one."""

    spec: Spec

    def values(self, word: str, every: Sequence[Any], default: Any) -> Sequence[Any]:
        """The values of a word, of `every` that it may have."""
        return self._allowed(getattr(self.spec.parallel, word), every, default)

    def _allowed(self, stated: Any, every: Sequence[Any], default: Any) -> Sequence[Any]:
        if stated == "auto":
            return every
        if isinstance(stated, tuple):
            return [value for value in every if value in stated]
        return [value for value in every if value == (default if stated is None else stated)]

    def bases(self) -> Iterator[tuple[Base, list[list[Pair]]]]:
        """The sizes that break no rule of ranks, widths, experts and the batch: each base with the pairs of `ep` and
        `etp` that each kind of mixtures may have with it."""
        for pp in self.values("pp", self._divisors, 1):
            if pp <= self.spec.subject.depth:
                of_stage = divisors(self._ranks // pp)
                pairs = self._pairs(of_stage)
                for sharing, sequences in self._shared(of_stage) if all(pairs) else ():
                    for parts in self._microbatches(pp, sequences):
                        yield Base(pp, *sharing, parts), pairs

    def plans(self) -> Iterator[tuple[Sizes, Pipelined]]:
        """Every plan but for `zero` and `recompute`, which no rule refuses."""
        for base, pairs in self.bases():
            for pipelined in self.pipelined(base.pp, self.sequences(base), base.microbatches):
                for experts in itertools.product(*pairs):
                    yield Sizes(*base, experts), pipelined

    def sequences(self, sizes: Base | Sizes) -> int:
        """The sequences of a data-parallel rank in a step."""
        assert self.spec.train is not None
        return self.spec.train.batch * sizes.pp * sizes.cp * sizes.tp // self._ranks

    @property
    def recomputed(self) -> Sequence[Recompute]:
        """What may be computed again; a model without mixtures has no experts."""
        found = self.values("recompute", RECOMPUTED, "none")
        has_experts = any(moe is not None for moe in self.spec.subject.mixtures)
        return found if has_experts or len(found) < 2 else [word for word in found if word != "experts"]

    @property
    def _ranks(self) -> int:
        return self.spec.cluster.ranks

    @cached_property
    def _divisors(self) -> list[int]:
        return divisors(self._ranks)

    @cached_property
    def _dividing(self) -> set[SharingDegrees]:
        """The degrees that divide the sizes of layers and the sequences."""
        pairs = (SharingDegrees(cp, tp) for cp in self._divisors for tp in self._divisors)
        return {sharing for sharing in pairs if self._ranks % sharing.sharers == 0 and divides(self.spec, sharing)}

    def _shared(self, of_stage: Sequence[int]) -> Iterator[tuple[SharingDegrees, int]]:
        """`cp` and `tp` of a stage's ranks, and the sequences of each data-parallel rank."""
        assert self.spec.train is not None
        for cp in self.values("cp", of_stage, 1):
            for tp in self.values("tp", of_stage, 1):
                dp, left = divmod(of_stage[-1], cp * tp)
                if left or (cp, tp) not in self._dividing or not self.values("dp", [dp], dp):
                    continue
                sequences, left = divmod(self.spec.train.batch, dp)
                if not left:
                    yield SharingDegrees(cp, tp), sequences

    def _microbatches(self, pp: int, sequences: int) -> Iterator[int]:
        """The micro-batches of a rank's sequences; by default those of which schedules take the first that they can."""
        every = divisors(sequences)
        if self.spec.parallel.microbatches is not None:
            yield from self.values("microbatches", every, 1)
        elif pp == 1:
            yield 1
        else:
            yield from sorted({self._default(pp, sequences, each) for each in self._schedules(pp)} - {0})

    def _default(self, pp: int, sequences: int, pipelined: Pipelined) -> int:
        """The smallest number of micro-batches from `pp` on that a schedule takes; 0 for none."""
        numbers = (number for number in divisors(sequences) if number >= pp)
        pipelines = (Pipeline(pp, pipelined.virtual, number) for number in numbers)
        return next((each.microbatches for each in pipelines if takes(pipelined.schedule, each)), 0)

    def _pairs(self, of_stage: Sequence[int]) -> list[list[Pair]]:
        """The `ep` and `etp` of a stage's ranks, of each kind of mixtures."""
        return [list(self._of_kind(kind, of_stage)) for kind in self.kinds]

    def _of_kind(self, kind: Kind, of_stage: Sequence[int]) -> Iterator[Pair]:
        ranks = of_stage[-1]
        for etp in self._allowed(kind.etp, of_stage, 1):
            if any(width % etp for width in kind.widths):
                continue
            experts = math.gcd(ranks // etp, *kind.counts) if kind.counts else 1
            default = math.gcd(experts, *self._of_default(ranks)) if kind.ep is None else experts
            for ep in self._allowed(kind.ep, of_stage, default):
                if ranks % (ep * etp) == 0 and experts % ep == 0:
                    yield ep, etp

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of mixtures, which may have other `ep` and `etp`."""
        return kinds_of(self.spec)

    def _of_default(self, ranks: int) -> Iterator[int]:
        """What an `ep` that the file does not state divides: it is the same for all kinds without one."""
        for kind in self.kinds:
            if kind.ep is None:
                yield from (ranks // (number_of(kind.etp) or 1), *kind.counts)

    def pipelined(self, pp: int, sequences: int, microbatches: int) -> Iterator[Pipelined]:
        """The schedules, and stages of a rank, that take so many micro-batches of a rank's sequences."""
        if pp == 1:
            if self._is_right_without_pipeline:
                yield Pipelined("one_f_one_b", 1)
            return
        is_default = self.spec.parallel.microbatches is None
        for each in self._schedules(pp):
            if is_default:
                is_taken = microbatches == self._default(pp, sequences, each)
            else:
                is_taken = takes(each.schedule, Pipeline(pp, each.virtual, microbatches))
            if is_taken:
                yield each

    @cached_property
    def _is_right_without_pipeline(self) -> bool:
        """Whether the words of pipelines that the file states break no rule with `pp = 1`."""
        parallel = self.spec.parallel
        schedule = parallel.schedule if isinstance(parallel.schedule, str) and parallel.schedule != "auto" else None
        if parallel.pp is None:
            return schedule is None and parallel.virtual is None and parallel.stages is None
        kind = STAGES_OF_RANK[schedule or "one_f_one_b"]
        virtual = parallel.virtual or kind.default
        return kind.fitting(virtual) == virtual <= self.spec.subject.depth and self._has_stages(virtual)

    @property
    def _has_open_schedule(self) -> bool:
        return "schedule" in open_words(self.spec)

    def _schedules(self, pp: int) -> Sequence[Pipelined]:
        """Every schedule with each number of stages of a rank that makes the longest rank no longer than fewer do."""
        if pp not in self._known_schedules:
            self._known_schedules[pp] = list(self._new_schedules(pp))
        return self._known_schedules[pp]

    @cached_property
    def _known_schedules(self) -> dict[int, Sequence[Pipelined]]:
        return {}

    def _new_schedules(self, pp: int) -> Iterator[Pipelined]:
        depth, parallel = self.spec.subject.depth, self.spec.parallel
        every = SCHEDULES if parallel.schedule == "auto" else tuple(STAGES_OF_RANK)
        for schedule in self.values("schedule", every, "one_f_one_b"):
            least = depth + 1
            for virtual in range(1, depth // pp + 1):
                longest = -(-depth // (pp * virtual)) * virtual
                is_no_longer, least = longest <= least, min(least, longest)
                if self._takes_virtual(schedule, virtual, is_no_longer) and self._has_stages(pp * virtual):
                    yield Pipelined(schedule, virtual)

    def _takes_virtual(self, schedule: str, virtual: int, is_no_longer: bool) -> bool:
        kind, parallel = STAGES_OF_RANK[schedule], self.spec.parallel
        if kind.fitting(virtual) != virtual:
            return False
        if parallel.virtual is not None:
            return virtual == parallel.virtual
        if self._has_open_schedule and not kind.only:
            return is_no_longer and virtual >= (2 if kind.default == 2 else 1)  # one stage: 1F1B, or `gpipe`
        return virtual == kind.default

    def _has_stages(self, number: int) -> bool:
        stages = self.spec.parallel.stages
        return stages is None or len(stages) == number

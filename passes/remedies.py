"""Changes to a file with which a step fits its device, found in the order of the estimated time of a step.

The changes are every combination of `zero`, `recompute`, the numbers of micro-batches that divide a rank's sequences,
and the `ep` that divide ranks and experts; and more ranks, with the file's own words or with such a combination. What
is given was compiled, and its peak fits. Changes that leave `ROOM` of the device's memory come before others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.passes.cost.memory import ALWAYS, memory_of
from moec.passes.cost.step_time import step_seconds
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.cost.workload import Workload
from moec.passes.ir import Program, Recompute
from moec.passes.ir.interface import layers_by_block
from moec.passes.place.degrees import choose_degrees
from moec.passes.place.stated_degrees import divisors, microbatches_of, recomputed_of, zero_of

RECOMPUTED: tuple[Recompute, ...] = ("none", "experts", "layer")
STAGES = (0, 1, 2, 3)
MORE_RANKS = (2, 4, 8, 16)

SAME_TIME = 0.05
"""Estimates of times fall into steps of 5 %. Within a step, fewer changed words come first."""

ROOM = 0.1
"""Part of a device's memory: predicted peaks were at most 9.3 % off the measured ones (benchmarks/bench_memory.py), and
what a driver and communicators take is not in them."""

Place = Callable[[Spec], Program]


@dataclass(frozen=True, slots=True)
class Words:
    """Words of `parallel` that change the memory of a step. `ep` is None where the file has several, or no experts."""

    ep: int | None
    zero: int
    recompute: Recompute
    microbatches: int

    @classmethod
    def of(cls, spec: Spec) -> Words:
        """The words that `spec` states, or their defaults."""
        degrees = {experts.ep for experts in choose_degrees(spec).experts}
        stated_by_layers = any(layers.ep is not None for layers in spec.parallel.layers)
        ep = degrees.pop() if len(degrees) == 1 and not stated_by_layers else None
        recompute = spec.parallel.recompute
        assert recompute != "auto", "rejected earlier"
        return cls(ep, zero_of(spec), recompute, microbatches_of(spec))

    def spec(self, spec: Spec) -> Spec:
        """`spec` with the words that differ from its words."""
        return spec.replace(parallel=spec.parallel.replace(**self._differing(Words.of(spec))))

    def written(self, other: Words) -> str:
        """The words that differ from `other`, as one writes them."""
        return ", ".join(f"`{word} = {value}`" for word, value in self._differing(other).items())

    def num_differing(self, other: Words) -> int:
        """The number of words that differ from `other`."""
        return len(self._differing(other))

    def _differing(self, other: Words) -> dict[str, object]:
        pairs = ((word, getattr(self, word), getattr(other, word)) for word in self.__slots__)
        return {word: mine for word, mine, theirs in pairs if mine != theirs}


@dataclass(frozen=True, slots=True)
class Change:
    """A change as one tells a user, the number of words that it sets, and its peak in bytes."""

    text: str
    num_words: int
    peak: float


def first_that_fits(spec: Spec, place: Place) -> Change | None:
    """The first change with which a step fits the device; None if none does.

    Changes of words come in the order of `step_seconds`; then more ranks, with the file's own words; then the fewest
    ranks that fit with a change of words. `place` compiles a Spec.
    """
    if found := _words_that_fit(_Search(spec, place)):
        return Change(f"set {found.text}", found.num_words, found.peak)
    larger = [more for times in MORE_RANKS if _has_degrees(more := _with_ranks(spec, times))]
    peaks = {more.cluster.ranks: peak for more in larger if (peak := _peak(more, place))}
    if peaks:
        memory = spec.cluster.device.memory
        ranks = next((ranks for ranks, peak in peaks.items() if has_room(peak, memory)), min(peaks))
        return Change(f"use {ranks} ranks", 1, peaks[ranks])
    for more in larger:
        search = _Search(more, place)
        if search.is_promising() and (found := _words_that_fit(search)):
            return Change(f"use {more.cluster.ranks} ranks and set {found.text}", 1 + found.num_words, found.peak)
    return None


def has_room(peak: float, memory: float) -> bool:
    """Whether a peak leaves `ROOM` of the memory of a device, both in bytes."""
    return peak <= (1 - ROOM) * memory


def what_could_help(spec: Spec, place: Place) -> list[str]:
    """Changes of `train` that may make a step fit where `first_that_fits` gives None.

    More ranks with as many times the batch are named if some words fit there, and the file's batch does not divide over
    them; a smaller batch if one sequence for each rank fits; shorter sequences if parameters, gradients and optimizer
    states fit. A part of a step has a single sequence already with the most micro-batches, so that a smaller batch only
    saves what micro-batches keep.
    """
    assert spec.train is not None
    helps = []
    for times in MORE_RANKS:
        more, batch = _with_ranks(spec, times), spec.train.batch * times
        larger = more.replace(train=spec.train.replace(batch=batch))
        if not _has_degrees(more) and _has_degrees(larger) and _Search(larger, place).is_promising():
            helps.append(f"{more.cluster.ranks} ranks with `batch = {batch}`")
            break
    smallest = spec.replace(train=spec.train.replace(batch=choose_degrees(spec).dp))
    if smallest.train != spec.train and _Search(smallest, place).is_promising():
        helps.append("a smaller batch")
    return [*helps, "shorter sequences"] if _Search(spec, place).holds_states() else helps


def _words_that_fit(search: _Search) -> Change | None:
    """The combination of words that fits in the least time, as one writes it: with room, or else without."""
    for search.room in (ROOM, 0.0):
        for words in search.fitting():
            if peak := _peak(words.spec(search.spec), search.place):
                return Change(words.written(search.stated), words.num_differing(search.stated), peak)
    return None


@dataclass
class _Search:
    """Combinations of words as a queue by time. It compiles once for each `ep` and `zero`: other words keep the ops.

    A combination is queued with one micro-batch. From 2 on, more micro-batches take less memory and more time, so the
    fewest that fit are found by halving, and queued again with their time.
    """

    spec: Spec
    place: Place
    programs: dict[tuple[int | None, int], Program | None] = field(default_factory=dict)
    """None: another rule forbids it."""
    costs: dict[tuple[int | None, int, int], dict[str, BlockCost]] = field(default_factory=dict)
    too_small: set[tuple[int | None, int]] = field(default_factory=set)
    """The `ep` and `zero` whose parameters and optimizer states alone do not fit."""
    room: float = 0.0
    """The part of the device's memory that stays free."""

    @cached_property
    def stated(self) -> Words:
        """The words of the file."""
        return Words.of(self.spec)

    def fitting(self) -> Iterator[Words]:
        """The words that fit, the least time first."""
        parts = self._parts()
        queue: list[tuple[tuple[float, ...], tuple[int, int], Words, bool]] = []
        combinations = itertools.product(_degrees(self.spec, self.stated), STAGES)
        for order, (ep, zero) in enumerate(c for c in combinations if self._compiled(*c)):
            for more, recompute in enumerate(RECOMPUTED):
                words = Words(ep, zero, recompute, parts[0])
                queue.append((self._time(words), (order, more), words, False))
        heapq.heapify(queue)
        while queue:
            _, place, words, fits = heapq.heappop(queue)
            if fits or self._fits(words):
                yield words
            elif found := self._with_more_parts(words, parts[1:]):
                heapq.heappush(queue, (self._time(found), place, found, True))

    def is_promising(self) -> bool:
        """Whether a combination fits that saves most: ZeRO 1 to 3, `recompute = layer`, one micro-batch or the most."""
        parts = self._parts()
        for ep in _degrees(self.spec, self.stated):
            for zero in reversed(STAGES[1:]):
                if self._compiled(ep, zero):
                    words = Words(ep, zero, "layer", parts[0])
                    if self._fits(words) or self._fits(replace(words, microbatches=parts[-1])):
                        return True
                if (ep, STAGES[-1]) in self.too_small:  # as for every stage
                    break
        return False

    def holds_states(self) -> bool:
        """Whether parameters, gradients and optimizer states fit under ZeRO 3, with some `ep`."""
        for ep in _degrees(self.spec, self.stated):
            if program := self._compiled(ep, STAGES[-1]):
                words = replace(self.stated, ep=ep, zero=STAGES[-1])
                last = memory_of(program, words.spec(self.spec)).moments[-1].bytes.of
                if sum(last.get(t, 0.0) for t in (*ALWAYS, "gradients")) <= self.spec.cluster.device.memory:
                    return True
        return False

    def _parts(self) -> list[int]:
        """The numbers of micro-batches that divide a rank's sequences."""
        assert self.spec.train is not None
        return divisors(max(1, self.spec.train.batch // choose_degrees(self.spec).dp))

    def _compiled(self, ep: int | None, zero: int) -> Program | None:
        if (ep, zero) not in self.programs:
            try:
                words = replace(self.stated, ep=ep, zero=zero)
                self.programs[ep, zero] = self.place(words.spec(self.spec))
            except DiagnosticError:
                self.programs[ep, zero] = None
        return self.programs[ep, zero]

    def _program(self, words: Words) -> Program:
        """The Program of these words. Layers of one block recompute the same, unless `layers` says otherwise."""
        program, recomputed = self._compiled(words.ep, words.zero), recomputed_of(words.spec(self.spec))
        assert program is not None
        found: dict[str, set[Recompute]] = {
            name: {recomputed[number] for number in numbers}
            for name, numbers in layers_by_block(program).items()
            if numbers
        }
        if any(len(of) > 1 for of in found.values()):
            return self.place(words.spec(self.spec))
        blocks = (replace(b, recompute=next(iter(found.get(b.name, {b.recompute})))) for b in program.blocks)
        return replace(program, blocks=tuple(blocks), microbatches=words.microbatches)

    def _time(self, words: Words) -> tuple[float, ...]:
        """The estimated time in steps of `SAME_TIME`, the number of changed words, and the time."""
        program, key = self._program(words), (words.ep, words.zero, words.microbatches)
        costs = self.costs.get(key)
        if costs is None or costs.keys() != {block.name for block in program.blocks}:
            workload = Workload.of(self.spec, program)
            costs = costs_of(program, replace(workload, batch=-(-workload.batch // words.microbatches)))
            self.costs[key] = costs
        seconds = step_seconds(_with_blocks(costs, program), program, self.spec)
        return round(math.log(seconds) / math.log1p(SAME_TIME)), words.num_differing(self.stated), seconds

    def _fits(self, words: Words) -> bool:
        if (words.ep, words.zero) in self.too_small:
            return False
        capacity = self.spec.cluster.device.memory
        peak = memory_of(self._program(words), words.spec(self.spec)).peak.bytes
        if sum(peak.of.get(kind, 0.0) for kind in ALWAYS) > capacity:
            self.too_small.add((words.ep, words.zero))
        return peak.total <= (1 - self.room) * capacity

    def _with_more_parts(self, words: Words, parts: list[int]) -> Words | None:
        """`words` with the fewest of these micro-batches that fit."""
        if not parts or not self._fits(replace(words, microbatches=parts[-1])):
            return None
        low, high = 0, len(parts) - 1
        while low < high:
            middle = (low + high) // 2
            fits = self._fits(replace(words, microbatches=parts[middle]))
            low, high = (low, middle) if fits else (middle + 1, high)
        return replace(words, microbatches=parts[low])


def _with_blocks(costs: Mapping[str, BlockCost], program: Program) -> dict[str, BlockCost]:
    return {block.name: replace(costs[block.name], block=block) for block in program.blocks}


def _degrees(spec: Spec, stated: Words) -> list[int | None]:
    """The `ep` that divide ranks and every layer's experts; that of the file first."""
    if stated.ep is None:
        return [None]
    counts = [count for moe in spec.subject.mixtures if moe is not None for count in moe.counts]
    fitting = [d for d in divisors(spec.cluster.ranks) if all(count % d == 0 for count in counts)]
    return sorted(fitting, key=lambda d: (d != stated.ep, d))


def _with_ranks(spec: Spec, times: int) -> Spec:
    *inner, outermost = spec.cluster.levels
    levels = (*inner, outermost.replace(size=outermost.size * times))
    parallel = spec.parallel.replace(dp=None)
    return spec.replace(cluster=spec.cluster.replace(levels=levels), parallel=parallel)


def _has_degrees(spec: Spec) -> bool:
    """Whether its ranks divide the batch, and its degrees the ranks."""
    try:
        choose_degrees(spec)
    except DiagnosticError:
        return False
    return True


def _peak(spec: Spec, place: Place) -> float | None:
    """The peak in bytes if `spec` compiles and fits its device."""
    try:
        peak = memory_of(place(spec), spec).peak.bytes.total
    except DiagnosticError:
        return None
    return peak if peak <= spec.cluster.device.memory else None

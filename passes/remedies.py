"""Changes to a file with which a step fits its device, found in the order of the estimated time of a step.

The changes are every combination of `zero`, `recompute`, the numbers of micro-batches that divide a rank's sequences,
and the `ep` that divide ranks and experts; and more ranks, with the file's own words or with such a combination. Each
proposed change was compiled, and its peak fits. Changes that leave `ROOM` of the device's memory come before others.
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
from moec.passes.budget import gigabytes
from moec.passes.cost.memory import ALWAYS, memory_of
from moec.passes.cost.step_time import step_seconds
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.degrees.degrees import Degrees, choose_degrees
from moec.passes.degrees.stated_degrees import divisors, takes_microbatches
from moec.passes.ir import Program, Recompute
from moec.passes.ir.work.workload import Workload

RECOMPUTED: tuple[Recompute, ...] = ("none", "experts", "layer")
STAGES = (0, 1, 2, 3)
MORE_RANKS = (2, 4, 8, 16)

SAME_TIME = 0.05
"""Estimates of times fall into steps of 5 %. Within a step, fewer changed words come first."""

ROOM = 0.1
"""Part of a device's memory: predicted peaks were at most 9.3 % off the measured ones (benchmarks/bench_memory.py), and
what a driver and communicators take is not in them."""

NOTHING_FITS = "none of the changes tried fits: use a device with more memory, {helps}or a smaller model"

Placing = Callable[[Spec, Degrees], Program]
"""Compiles a Spec with these degrees."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change in words, the number of words of the file that it sets, and the peak of its step in bytes."""

    text: str
    num_words: int
    peak: float


def advice(spec: Spec, degrees: Degrees, place: Placing) -> str:
    """The help of MOE0501: ``set `zero = 1`: it fits (61.3 of 80 GB)``, or what may help where no change fits."""
    change, memory = first_that_fits(spec, degrees, place), spec.cluster.device.memory
    if change is None:
        return NOTHING_FITS.format(helps="".join(f"{help}, " for help in what_could_help(spec, degrees, place)))
    fits = "it fits" if change.num_words == 1 else "they fit"
    tight = "" if has_room(change.peak, memory) else f"; less than {ROOM:.0%} stay free, which a prediction may miss by"
    return f"{change.text}: {fits} ({gigabytes(change.peak, memory)}){tight}"


def first_that_fits(spec: Spec, degrees: Degrees, place: Placing) -> Change | None:
    """The first change with which a step fits the device; None if none does.

    Changes of degrees come in the order of `step_seconds`; then more ranks, with the file's own words; then the fewest
    ranks that fit with a change of degrees.
    """
    if change := _degrees_that_fit(_Search(spec, degrees, place)):
        return Change(f"set {change.text}", change.num_words, change.peak)
    clusters = [(larger, scaled) for times in MORE_RANKS if (scaled := _degrees_of(larger := _with_ranks(spec, times)))]
    peaks = {scaled.all_ranks: peak for larger, scaled in clusters if (peak := _peak(larger, scaled, place))}
    if peaks:
        memory = spec.cluster.device.memory
        ranks = next((ranks for ranks, peak in peaks.items() if has_room(peak, memory)), min(peaks))
        return Change(f"use {ranks} ranks", 1, peaks[ranks])
    for larger, scaled in clusters:
        search = _Search(larger, scaled, place)
        if search.is_promising() and (change := _degrees_that_fit(search)):
            return Change(f"use {scaled.all_ranks} ranks and set {change.text}", 1 + change.num_words, change.peak)
    return None


def has_room(peak: float, memory: float) -> bool:
    """Whether a peak leaves `ROOM` of the memory of a device, both in bytes."""
    return peak <= (1 - ROOM) * memory


def what_could_help(spec: Spec, degrees: Degrees, place: Placing) -> list[str]:
    """Changes of `train` that may make a step fit where `first_that_fits` gives None.

    More ranks with as many times the batch are named if some degrees fit there, and the file's batch does not divide
    over them; a smaller batch if one sequence for each rank fits; shorter sequences if parameters, gradients and
    optimizer states fit. A part of a step has a single sequence already with the most micro-batches, so that a smaller
    batch only saves what micro-batches keep.
    """
    assert spec.train is not None
    helps = []
    for times in MORE_RANKS:
        larger_cluster, batch = _with_ranks(spec, times), spec.train.batch * times
        larger_batch = larger_cluster.replace(train=spec.train.replace(batch=batch))
        candidate = None if _degrees_of(larger_cluster) else _degrees_of(larger_batch)
        if candidate is not None and _Search(larger_batch, candidate, place).is_promising():
            helps.append(f"{larger_cluster.cluster.ranks} ranks with `batch = {batch}`")
            break
    smallest = spec.replace(train=spec.train.replace(batch=degrees.dp))
    candidate = degrees._replace(microbatches=1)
    if smallest.train != spec.train and _Search(smallest, candidate, place).is_promising():
        helps.append("a smaller batch")
    return [*helps, "shorter sequences"] if _Search(spec, degrees, place).holds_states() else helps


def _degrees_that_fit(search: _Search) -> Change | None:
    """The degrees that fit with the least time, in words: with `ROOM`, or else without."""
    for search.room in (ROOM, 0.0):
        for degrees in search.fitting():
            if peak := _peak(search.spec, degrees, search.place):
                changes = degrees.changes_from(search.stated)
                return Change(", ".join(f"`{word} = {value}`" for word, value in changes.items()), len(changes), peak)
    return None


@dataclass
class _Search:
    """Searches combinations of degrees by time. Compiles once for each `ep` and `zero`: other words change no op.

    A combination enters the queue with one micro-batch. From 2 on, more micro-batches take less memory and more time,
    so bisection finds the fewest that fit, and the combination enters the queue again with their time.
    """

    spec: Spec
    stated: Degrees
    place: Placing
    programs: dict[tuple[int | None, int], Program | None] = field(default_factory=dict)
    """The Programs by `ep` and `zero`; None where another rule forbids the combination."""
    costs: dict[tuple[int | None, int, int], dict[str, BlockCost]] = field(default_factory=dict)
    too_small: set[tuple[int | None, int]] = field(default_factory=set)
    """The `ep` and `zero` whose parameters and optimizer states alone do not fit."""
    room: float = 0.0
    """The part of the device's memory that stays free."""

    def fitting(self) -> Iterator[Degrees]:
        """The degrees that fit, the least time first."""
        parts = self._parts()
        queue: list[tuple[tuple[float, ...], tuple[int, int], Degrees, bool]] = []
        combinations = itertools.product(self._eps, STAGES)
        for order, (ep, zero) in enumerate(c for c in combinations if self._compiled(*c)):
            for number, recompute in enumerate(RECOMPUTED):
                degrees = self._with(ep, zero).recomputing(recompute)._replace(microbatches=parts[0])
                queue.append((self._time(degrees), (order, number), degrees, False))
        heapq.heapify(queue)
        while queue:
            _, place, degrees, fits = heapq.heappop(queue)
            if fits or self._fits(degrees):
                yield degrees
            elif smaller := self._with_more_parts(degrees, parts[1:]):
                heapq.heappush(queue, (self._time(smaller), place, smaller, True))

    def is_promising(self) -> bool:
        """Whether a combination with little memory fits: ZeRO 1 to 3, `recompute = layer`, 1 or most micro-batches."""
        parts = self._parts()
        for ep in self._eps:
            for zero in reversed(STAGES[1:]):
                if self._compiled(ep, zero):
                    degrees = self._with(ep, zero).recomputing("layer")._replace(microbatches=parts[0])
                    if self._fits(degrees) or self._fits(degrees._replace(microbatches=parts[-1])):
                        return True
                if (ep, STAGES[-1]) in self.too_small:  # as for every stage
                    break
        return False

    def holds_states(self) -> bool:
        """Whether parameters, gradients and optimizer states fit under ZeRO 3, with some `ep`."""
        for ep in self._eps:
            if program := self._compiled(ep, STAGES[-1]):
                last = memory_of(program, self.spec).moments[-1].bytes.of
                if sum(last.get(t, 0.0) for t in (*ALWAYS, "gradients")) <= self.spec.cluster.device.memory:
                    return True
        return False

    @cached_property
    def _eps(self) -> list[int | None]:
        """The `ep` that fit ranks, experts and each `etp`; that of the file first. None where it has several."""
        stated = {experts.ep for experts in self.stated.experts}
        if len(stated) != 1 or "layers.ep" in self.stated.stated:
            return [None]
        counts = (count for moe in self.spec.subject.mixtures if moe is not None for count in moe.counts)
        fitting = divisors(math.gcd(*(self.stated.ranks // e.etp for e in self.stated.experts), *counts))
        return sorted(fitting, key=lambda d: (d not in stated, d))

    def _ep_of(self, degrees: Degrees) -> int | None:
        return None if self._eps == [None] else degrees.experts[0].ep

    def _parts(self) -> list[int]:
        """The numbers of micro-batches that divide a rank's sequences, and for which its schedule has a table."""
        assert self.spec.train is not None
        parts = divisors(max(1, self.spec.train.batch // self.stated.dp))
        return [n for n in parts if takes_microbatches(self.spec, n)]

    def _with(self, ep: int | None, zero: int) -> Degrees:
        degrees = self.stated if ep is None else self.stated.with_ep(ep)
        return degrees._replace(zero=zero)

    def _compiled(self, ep: int | None, zero: int) -> Program | None:
        if (ep, zero) not in self.programs:
            degrees = self._with(ep, zero)
            try:
                degrees.require_near(self.spec)
                self.programs[ep, zero] = self.place(self.spec, degrees)
            except DiagnosticError:
                self.programs[ep, zero] = None
        return self.programs[ep, zero]

    def _program(self, degrees: Degrees) -> Program:
        """The Program of these degrees. Layers of one block recompute the same, unless `layers` says otherwise."""
        program = self._compiled(self._ep_of(degrees), degrees.zero)
        assert program is not None
        words = {
            name: {degrees.recompute[number] for number in numbers}
            for name, numbers in program.layers_by_block.items()
            if numbers
        }
        if any(len(parts) > 1 for parts in words.values()):
            return self.place(self.spec, degrees)
        blocks = (replace(b, recompute=next(iter(words.get(b.name, {b.recompute})))) for b in program.blocks)
        return replace(program, blocks=tuple(blocks), microbatches=degrees.microbatches)

    def _time(self, degrees: Degrees) -> tuple[float, ...]:
        """The estimated time in steps of `SAME_TIME`, the number of changed words, and the time."""
        program, key = self._program(degrees), (self._ep_of(degrees), degrees.zero, degrees.microbatches)
        costs = self.costs.get(key)
        if costs is None or costs.keys() != {block.name for block in program.blocks}:
            workload = Workload.of(self.spec, program)
            costs = costs_of(program, replace(workload, batch=-(-workload.batch // degrees.microbatches)))
            self.costs[key] = costs
        seconds = step_seconds(_with_blocks(costs, program), program, self.spec).total
        return round(math.log(seconds) / math.log1p(SAME_TIME)), len(degrees.changes_from(self.stated)), seconds

    def _fits(self, degrees: Degrees) -> bool:
        key = self._ep_of(degrees), degrees.zero
        if key in self.too_small:
            return False
        capacity = self.spec.cluster.device.memory
        peak = memory_of(self._program(degrees), self.spec).peak.bytes
        if sum(peak.of.get(kind, 0.0) for kind in ALWAYS) > capacity:
            self.too_small.add(key)
        return peak.total <= (1 - self.room) * capacity

    def _with_more_parts(self, degrees: Degrees, parts: list[int]) -> Degrees | None:
        """`degrees` with the fewest of these micro-batches that fit."""
        if not parts or not self._fits(degrees._replace(microbatches=parts[-1])):
            return None
        low, high = 0, len(parts) - 1
        while low < high:
            middle = (low + high) // 2
            fits = self._fits(degrees._replace(microbatches=parts[middle]))
            low, high = (low, middle) if fits else (middle + 1, high)
        return degrees._replace(microbatches=parts[low])


def _with_blocks(costs: Mapping[str, BlockCost], program: Program) -> dict[str, BlockCost]:
    return {block.name: replace(costs[block.name], block=block) for block in program.blocks}


def _with_ranks(spec: Spec, times: int) -> Spec:
    *inner, outermost = spec.cluster.levels
    levels = (*inner, outermost.replace(size=outermost.size * times))
    parallel = spec.parallel.replace(dp=None)
    return spec.replace(cluster=spec.cluster.replace(levels=levels), parallel=parallel)


def _degrees_of(spec: Spec) -> Degrees | None:
    """The degrees of a Spec; None where its ranks do not divide the batch, or its degrees the ranks."""
    try:
        return choose_degrees(spec)
    except DiagnosticError:
        return None


def _peak(spec: Spec, degrees: Degrees, place: Placing) -> float | None:
    """The peak in bytes if a step with these degrees compiles and fits its device."""
    try:
        peak = memory_of(place(spec, degrees), spec).peak.bytes.total
    except DiagnosticError:
        return None
    return peak if peak <= spec.cluster.device.memory else None

"""Changes to a file with which a step fits its device, found in the order of the estimated time of a step.

The changes are every combination of `zero`, `recompute`, the numbers of micro-batches that divide a rank's sequences,
and the `ep` that divide ranks and experts. A change that is given was compiled, and its peak fits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

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

    Changes of words come in the order of `step_seconds`; then more ranks, with the file's own words. `place` compiles a
    Spec.
    """
    stated = Words.of(spec)
    for words in _Search(spec, place, stated).fitting():
        if peak := _peak(words.spec(spec), place):
            return Change(f"set {words.written(stated)}", words.num_differing(stated), peak)
    for times in MORE_RANKS:
        if peak := _peak(_with_ranks(spec, times), place):
            return Change(f"use {spec.cluster.ranks * times} ranks", 1, peak)
    return None


@dataclass
class _Search:
    """Combinations of words as a queue by time. It compiles once for each `ep` and `zero`: other words keep the ops.

    A combination is queued with one micro-batch. From 2 on, more micro-batches take less memory and more time, so the
    fewest that fit are found by halving, and queued again with their time.
    """

    spec: Spec
    place: Place
    stated: Words
    programs: dict[tuple[int | None, int], Program] = field(default_factory=dict)
    costs: dict[tuple[int | None, int, int], dict[str, BlockCost]] = field(default_factory=dict)
    too_small: set[tuple[int | None, int]] = field(default_factory=set)
    """The `ep` and `zero` whose parameters and optimizer states alone do not fit."""

    def fitting(self) -> Iterator[Words]:
        """The words that fit, the least time first."""
        assert self.spec.train is not None
        parts = divisors(max(1, self.spec.train.batch // choose_degrees(self.spec).dp))
        queue: list[tuple[tuple[float, ...], tuple[int, int], Words, bool]] = []
        self._compile_all()
        for order, (ep, zero) in enumerate(self.programs):
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

    def _compile_all(self) -> None:
        for ep in _degrees(self.spec, self.stated):
            for zero in STAGES:
                try:
                    words = replace(self.stated, ep=ep, zero=zero)
                    self.programs[ep, zero] = self.place(words.spec(self.spec))
                except DiagnosticError:  # another rule forbids it
                    continue

    def _program(self, words: Words) -> Program:
        """The Program of these words. Layers of one block recompute the same, unless `layers` says otherwise."""
        program, recomputed = self.programs[words.ep, words.zero], recomputed_of(words.spec(self.spec))
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
        if sum(peak.of.get(tenant, 0.0) for tenant in ALWAYS) > capacity:
            self.too_small.add((words.ep, words.zero))
        return peak.total <= capacity

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
    counts = [moe.num_experts for moe in spec.subject.mixtures if moe is not None]
    fitting = [d for d in divisors(spec.cluster.ranks) if all(count % d == 0 for count in counts)]
    return sorted(fitting, key=lambda d: (d != stated.ep, d))


def _with_ranks(spec: Spec, times: int) -> Spec:
    *inner, outermost = spec.cluster.levels
    levels = (*inner, outermost.replace(size=outermost.size * times))
    parallel = spec.parallel.replace(dp=None)
    return spec.replace(cluster=spec.cluster.replace(levels=levels), parallel=parallel)


def _peak(spec: Spec, place: Place) -> float | None:
    """The peak in bytes if `spec` compiles and fits its device."""
    try:
        peak = memory_of(place(spec), spec).peak.bytes.total
    except DiagnosticError:
        return None
    return peak if peak <= spec.cluster.device.memory else None

"""Changes to a file that lower the memory of a step, the cheapest first, each tried by compiling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.grammar.supported import unsupported
from moec.passes.cost.memory import memory_of
from moec.passes.ir import Program
from moec.passes.place.degrees import choose_degrees
from moec.passes.place.stated_degrees import divisors

RECOMPUTED = ("none", "experts", "layer")
MORE_RANKS = (2, 4, 8, 16)

Place = Callable[[Spec], Program]


@dataclass(frozen=True, slots=True)
class Words:
    """Words of `parallel` that save memory, as numbers from the cheapest."""

    zero: int
    recompute: int
    microbatches: int

    def spec(self, spec: Spec) -> Spec:
        """`spec` with these words."""
        parallel = spec.parallel.replace(
            zero=self.zero,
            recompute=RECOMPUTED[self.recompute],
            microbatches=self.microbatches if self.microbatches > 1 else spec.parallel.microbatches,
        )
        return spec.replace(parallel=parallel)

    def written(self, other: Words) -> str:
        """The words that differ from `other`, as one writes them."""
        words = []
        if self.zero != other.zero:
            words.append(f"`zero = {self.zero}`")
        if self.recompute != other.recompute:
            words.append(f"`recompute = {RECOMPUTED[self.recompute]}`")
        if self.microbatches != other.microbatches:
            words.append(f"`microbatches = {self.microbatches}`")
        return ", ".join(words)


def first_that_fits(spec: Spec, place: Place) -> tuple[str, float] | None:
    """The first change with which a step fits the device, in words, and its peak in bytes. None if none does.

    One change alone is tried before two, and two before three; then more experts parallel, then more ranks.
    """
    stated = _stated(spec)
    most = max(1, _sequences_per_rank(spec))
    for words in _singles(stated, most):
        if peak := _peak(words.spec(spec), place):
            return f"set {words.written(stated)}", peak
    for ep in _larger_degrees(spec):
        if peak := _peak(spec.replace(parallel=spec.parallel.replace(ep=ep)), place):
            return f"set `ep = {ep}`", peak
    for words in _combined(stated):
        found = _fewest_microbatches(words, most, spec, place)
        if found is not None:
            words, peak = found
            return f"set {words.written(stated)}", peak
    for times in MORE_RANKS:
        if peak := _peak(_with_ranks(spec, times), place):
            return f"use {spec.cluster.ranks * times} ranks", peak
    return None


def _stated(spec: Spec) -> Words:
    parallel = spec.parallel
    zero = parallel.zero if isinstance(parallel.zero, int) else 0
    recompute = RECOMPUTED.index(parallel.recompute) if parallel.recompute in RECOMPUTED else 0
    return Words(zero, recompute, parallel.microbatches if isinstance(parallel.microbatches, int) else 1)


def _singles(stated: Words, most: int) -> Iterator[Words]:
    """One word changed: `zero`, then `recompute`, then the fewest micro-batches."""
    yield from (Words(zero, stated.recompute, stated.microbatches) for zero in range(stated.zero + 1, 4))
    yield from (Words(stated.zero, r, stated.microbatches) for r in range(stated.recompute + 1, len(RECOMPUTED)))
    yield from (Words(stated.zero, stated.recompute, m) for m in _parts(most) if m > stated.microbatches)


def _combined(stated: Words) -> list[Words]:
    """Every `zero` with every `recompute`, the fewest steps up first."""
    pairs = [(z, r) for z in range(stated.zero, 4) for r in range(stated.recompute, len(RECOMPUTED))]
    pairs.sort(key=lambda pair: (pair[0] - stated.zero + pair[1] - stated.recompute, pair[1]))
    return [Words(zero, recompute, stated.microbatches) for zero, recompute in pairs]


def _fewest_microbatches(words: Words, most: int, spec: Spec, place: Place) -> tuple[Words, float] | None:
    """`words` with the fewest micro-batches with which it fits. More micro-batches never take more memory."""
    parts = [m for m in _parts(most) if m >= words.microbatches] or [words.microbatches]
    low, high, best = 0, len(parts) - 1, None
    middle = high
    while low <= high:
        tried = Words(words.zero, words.recompute, parts[middle])
        if peak := _peak(tried.spec(spec), place):
            best, high = (tried, peak), middle - 1
        elif best is None:
            return None
        else:
            low = middle + 1
        middle = (low + high) // 2
    return best


def _parts(sequences: int) -> list[int]:
    return list(divisors(sequences))


def _sequences_per_rank(spec: Spec) -> int:
    assert spec.train is not None
    return spec.train.batch // choose_degrees(spec).dp


def _larger_degrees(spec: Spec) -> list[int]:
    """Expert-parallel degrees above that of the file, if all layers have one degree."""
    experts = choose_degrees(spec).experts
    if len(experts) != 1 or any(layers.ep is not None for layers in spec.parallel.layers):
        return []
    return [d for d in divisors(spec.cluster.ranks) if d > experts[0].ep]


def _with_ranks(spec: Spec, times: int) -> Spec:
    *inner, outermost = spec.cluster.levels
    levels = (*inner, outermost.replace(size=outermost.size * times))
    parallel = spec.parallel.replace(dp=None)
    return spec.replace(cluster=spec.cluster.replace(levels=levels), parallel=parallel)


def _peak(spec: Spec, place: Place) -> float | None:
    """The peak in bytes if `spec` compiles and fits its device."""
    if unsupported(spec):
        return None
    try:
        peak = memory_of(place(spec), spec).peak.bytes.total
    except DiagnosticError:
        return None
    return peak if peak <= spec.cluster.device.memory else None

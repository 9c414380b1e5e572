"""Recomputation of some layers: on each pipeline rank no more than its memory asks for.

Ranks of a pipeline keep different numbers of micro-batches, so that the first ones need more memory than the last.
Where the last ones recompute less, `partition` gives them more layers, and the slowest rank has fewer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from moec.grammar.spec.parallel import ParallelLayers
from moec.grammar.stated import with_words
from moec.passes.cost.rates import Rates
from moec.passes.ir import Program, Recompute
from moec.passes.ir.interface import layer_calls
from moec.passes.search.candidate import Candidate, PlacedPlan, Placements
from moec.passes.search.space import RECOMPUTED

ROUNDS = 4
"""How often words are changed by the memory of the plan that has them."""


def recomputing_less(plan: Candidate, places: Placements, allowed: Sequence[Recompute], rates: Rates) -> Candidate:
    """The fastest plan that is found in which some layers recompute less than all do in `plan`, which fits; `plan`
    itself if none is faster.

    With other words `partition` chooses other stages. So the first round lowers words by the memory that ranks have
    left, and the others raise those of ranks that then lack some.
    """
    last = next(number for number, word in enumerate(RECOMPUTED) if word == plan.spec.parallel.recompute)
    words = [word for word in RECOMPUTED[: last + 1] if word in allowed]
    if len(words) < 2:
        return plan
    depth, ranks = plan.spec.subject.depth, _layers_of_ranks(plan.program)
    peaks = [_peaks(_with(plan, places, [each] * depth)) for each in words]
    saved = [
        [(less - more) / len(layers) for less, more, layers in zip(*pair, ranks, strict=True)]
        for pair in itertools.pairwise(peaks)
    ]
    levels, used, best = [len(words) - 1] * depth, peaks[-1], plan
    for number in range(ROUNDS):
        before = list(levels)
        for rank, layers in enumerate(ranks):
            left, of_rank = plan.prediction.capacity - used[rank], [of[rank] for of in saved]
            (_raise if number else _lower)(levels, layers, left, of_rank)
        if levels == before:
            break
        placed = _with(plan, places, [words[level] for level in levels])
        used, ranks = _peaks(placed), _layers_of_ranks(placed.program)
        if placed.fits and (found := placed.candidate(rates)).prediction.step.total < best.prediction.step.total:
            best = found
    return best


def _lower(levels: list[int], layers: Sequence[int], left: float, saved: Sequence[float]) -> None:
    """Lowers the levels of a rank's layers while it has bytes to spare. `saved`: the bytes that a layer saves with each
    level above the first."""
    while levels[layer := max(layers, key=levels.__getitem__)] > 0 and saved[levels[layer] - 1] <= left:
        levels[layer] -= 1
        left -= saved[levels[layer]]


def _raise(levels: list[int], layers: Sequence[int], left: float, saved: Sequence[float]) -> None:
    """Raises the levels of a rank's layers until they save as many bytes as it lacks."""
    while left < 0 and levels[layer := min(layers, key=levels.__getitem__)] < len(saved):
        left += saved[levels[layer]]
        levels[layer] += 1


def _with(plan: Candidate, places: Placements, words: Sequence[Recompute]) -> PlacedPlan:
    """The plan in which each layer has its word of `recompute`."""
    spec = plan.spec
    pairs = zip(words, spec.subject.mixtures, strict=True)
    own: list[Recompute] = ["none" if word == "experts" and moe is None else word for word, moe in pairs]
    (most, _), *others = Counter(own).most_common()
    blocks = tuple(
        ParallelLayers(layers=tuple(n for n, word in enumerate(own) if word == other), recompute=other)
        for other, _ in others
    )
    parts = ", ".join(f"{word} in {number}" for word, number in Counter(own).most_common() if word != "none")
    text = f"{parts} of {len(own)} layers" if others else most
    stated = with_words(spec, {"recompute": most, "layers": (*spec.parallel.layers, *blocks)})
    return places.plan(stated, {**plan.words, "recompute": text})


def _peaks(plan: PlacedPlan) -> list[float]:
    """The bytes at the peak of each pipeline rank."""
    return [rank.peak for rank in plan.ranks]


def _layers_of_ranks(program: Program) -> list[list[int]]:
    """The layers of each pipeline rank."""
    return [[call.layer for call in layer_calls(program, stages)] for stages in program.stages_by_rank]

"""The plan of a file that leaves words of `parallel` open: the fastest that fits.

Estimates rank all candidates; the first ones are placed, and their own predictions decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from moec.grammar.spec import Spec
from moec.grammar.stated import open_words, searched_words, with_words
from moec.passes.cost.rates import ClusterRates, Rates
from moec.passes.search.candidate import Candidate, Choice, PlacedPlan, Placements, candidate_of
from moec.passes.search.kinds import in_short
from moec.passes.search.ranking import Ranked, rank
from moec.passes.search.recompute_less import recomputing_less
from moec.passes.search.rules import require_choosable
from moec.passes.search.space import Space

ERROR = 0.12
"""Candidates are placed until the estimates of all others, less this share, are slower than the fastest one placed.
Estimates are at most 1.10 times the exact seconds of large models (decision 52)."""

MOST_PLACED = 24
MOST_NEAR = 12
"""The most candidates that are placed: of those whose estimated memory fits, and of those that exceed it by less than
estimates err (`ranking.NEAR`)."""

MOST_THAT_FIT = 8
"""Placing ends when so many of these fit."""

MOST_CHANGED = 24
"""The plans, by their estimates, of which some layers may recompute less than others."""


def choose(spec: Spec, rates: Rates | None = None) -> Choice:
    """The fastest plan that fits, of all values of the words that `spec` leaves open.

    `rates`: by default those that the file's cluster states. Raises `DiagnosticError` where no value keeps the rules of
    degrees, and where a word may not be left open.
    """
    require_choosable(spec)
    rates = rates or ClusterRates(spec.cluster)
    ranking = rank(spec, rates)
    places = Placements()
    found = _placed(spec, places, ranking.first, MOST_PLACED, rates)
    found += _placed(spec, places, ranking.near, MOST_NEAR, rates, min(map(_seconds, found), default=float("inf")))
    if not found:
        smallest = [_plan(spec, places, each).candidate(rates) for each in ranking.smallest]
        found = [candidate for candidate in smallest if candidate.prediction.fits]
        if not found:
            least = min(smallest, key=lambda candidate: candidate.prediction.memory.peak.bytes.total)
            return Choice(least, (), ranking.candidates, 0)
    mixed = _placed(spec, places, ranking.mixed, len(ranking.mixed), rates, min(map(_seconds, found)), MOST_CHANGED)
    found += [recomputing_less(plan, places, Space(spec).recomputed, rates) for plan in mixed]
    first, *others = sorted({plan.spec: plan for plan in found}.values(), key=_seconds)
    return Choice(first, tuple(others), ranking.candidates, max(ranking.fitting, 1))


def best(spec: Spec, rates: Rates | None = None) -> Candidate:
    """The plan of a file, chosen if it leaves words open. Raises `DiagnosticError` as a compilation would."""
    if open_words(spec):
        return choose(spec, rates).chosen
    return candidate_of(spec, rates=rates)


def _placed(
    spec: Spec,
    places: Placements,
    ranked: Sequence[Ranked],
    most: int,
    rates: Rates,
    fastest: float = float("inf"),
    most_that_fit: int = MOST_THAT_FIT,
) -> list[Candidate]:
    """The candidates that fit, of the first ones whose estimate comes near the `fastest`."""
    found = list[Candidate]()
    for each in ranked[:most]:
        if len(found) == most_that_fit or each.seconds * (1 - ERROR) > fastest:
            break
        if (plan := _plan(spec, places, each)).fits:
            found.append(candidate := plan.candidate(rates))
            fastest = min(fastest, _seconds(candidate))
    return found


def _seconds(candidate: Candidate) -> float:
    return candidate.prediction.step.total


def _plan(spec: Spec, places: Placements, ranked: Ranked) -> PlacedPlan:
    words = {word: ranked.words[word] for word in searched_words(spec)}
    return places.plan(with_words(spec, words), in_short(words))

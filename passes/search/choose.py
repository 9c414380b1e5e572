"""The plan of a file that leaves words of `parallel` open: the fastest that fits.

Estimates rank all candidates; the first ones are placed, and their own predictions decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from moec.grammar.spec import Spec
from moec.grammar.stated import open_words, searched_words, with_words
from moec.passes.cost.rates import ClusterRates, Rates
from moec.passes.search.candidate import Candidate, Choice, candidate_of, candidate_that_fits
from moec.passes.search.ranking import Ranked, rank
from moec.passes.search.rules import require_choosable

ERROR = 0.12
"""The error of estimated seconds, relative: candidates are placed until all others are slower by more. Those without a
pipeline have none, those of large models 0.11 at most (decision 52)."""

MOST_PLACED = 24
MOST_NEAR = 12
"""The most candidates that are placed: of those whose estimated memory fits, and of those that exceed it by less than
estimates err (`ranking.NEAR`)."""

MOST_THAT_FIT = 8
"""Placing ends when so many of these fit."""


def choose(spec: Spec, rates: Rates | None = None) -> Choice:
    """The fastest plan that fits, of all values of the words that `spec` leaves open.

    `rates`: by default those that the file's cluster states. Raises `DiagnosticError` where no value keeps the rules of
    degrees, and where a word may not be left open.
    """
    require_choosable(spec)
    rates = rates or ClusterRates(spec.cluster)
    ranking = rank(spec, rates)
    found = _placed(spec, ranking.first, MOST_PLACED, rates)
    found += _placed(spec, ranking.near, MOST_NEAR, rates, _seconds(found[0]) if found else float("inf"))
    if not found:
        smallest = [candidate_of(*_with_words(spec, each), rates) for each in ranking.smallest]
        found = [candidate for candidate in smallest if candidate.prediction.fits]
        if not found:
            least = min(smallest, key=lambda candidate: candidate.prediction.memory.peak.bytes.total)
            return Choice(least, (), ranking.candidates, 0)
    first, *others = sorted(found, key=_seconds)
    return Choice(first, tuple(others), ranking.candidates, max(ranking.fitting, len(found)))


def best(spec: Spec, rates: Rates | None = None) -> Candidate:
    """The plan of a file, chosen if it leaves words open. Raises `DiagnosticError` as a compilation would."""
    if open_words(spec):
        return choose(spec, rates).chosen
    return candidate_of(spec, rates=rates)


def _placed(
    spec: Spec, ranked: Sequence[Ranked], most: int, rates: Rates, fastest: float = float("inf")
) -> list[Candidate]:
    """The candidates that fit, the fastest first, of the first ones whose estimate comes near the `fastest`."""
    found = list[Candidate]()
    for each in ranked[:most]:
        if len(found) == MOST_THAT_FIT or each.seconds * (1 - ERROR) > fastest:
            break
        if candidate := candidate_that_fits(*_with_words(spec, each), rates):
            found.append(candidate)
            fastest = min(fastest, _seconds(candidate))
    return sorted(found, key=_seconds)


def _seconds(candidate: Candidate) -> float:
    return candidate.prediction.step.total


def _with_words(spec: Spec, ranked: Ranked) -> tuple[Spec, dict[str, int | str]]:
    """The file with the words of a candidate, and those that it has."""
    words = {word: ranked.words[word] for word in searched_words(spec)}
    return with_words(spec, words), {word: value for word, value in words.items() if value is not None}

"""The plan of a file that leaves words of `parallel` open: the fastest that fits.

Estimates rank all candidates; the first ones are placed, and their own predictions decide.
"""

from __future__ import annotations

from moec.grammar.spec import Spec
from moec.grammar.stated import open_words, with_words
from moec.passes.cost.rates import ClusterRates, Rates
from moec.passes.search.candidate import Candidate, Choice, candidate_of
from moec.passes.search.ranking import Ranked, Ranking, rank
from moec.passes.search.rules import require_choosable

ERROR = 0.1
"""The error of estimated seconds, relative: candidates are placed until all others are slower by more. Those without a
pipeline have none, those of large models 0.11 at most (decision 52)."""

MOST_THAT_FIT = 8
MOST_PLACED = 24
"""The most candidates that are placed, and the most of these that fit."""


def choose(spec: Spec, rates: Rates | None = None) -> Choice:
    """The fastest plan that fits, of all values of the words that `spec` leaves open.

    `rates`: by default those that the file's cluster states. Raises `DiagnosticError` where no value keeps the rules of
    degrees, and where a word may not be left open.
    """
    require_choosable(spec)
    rates = rates or ClusterRates(spec.cluster)
    ranking = rank(spec, rates)
    found = _placed(spec, ranking, rates)
    if not found:
        return Choice(_candidate(spec, ranking.smallest, rates), (), ranking.candidates, 0)
    first, *others = sorted(found, key=lambda candidate: candidate.prediction.step.total)
    return Choice(first, tuple(others), ranking.candidates, ranking.fitting)


def best(spec: Spec, rates: Rates | None = None) -> Candidate:
    """The plan of a file, chosen if it leaves words open. Raises `DiagnosticError` as a compilation would."""
    if open_words(spec):
        return choose(spec, rates).chosen
    return candidate_of(spec, rates=rates)


def _placed(spec: Spec, ranking: Ranking, rates: Rates) -> list[Candidate]:
    """The candidates that fit, of those whose estimate comes near the best's time."""
    found, best = list[Candidate](), float("inf")
    for ranked in ranking.first[:MOST_PLACED]:
        if len(found) == MOST_THAT_FIT or ranked.seconds * (1 - ERROR) > best:
            break
        candidate = _candidate(spec, ranked, rates)
        if candidate.prediction.fits:
            found.append(candidate)
            best = min(best, candidate.prediction.step.total)
    return found


def _candidate(spec: Spec, ranked: Ranked, rates: Rates) -> Candidate:
    words = {word: value for word, value in ranked.words.items() if word in (*open_words(spec), "virtual")}
    return candidate_of(
        with_words(spec, words), {word: value for word, value in words.items() if value is not None}, rates
    )

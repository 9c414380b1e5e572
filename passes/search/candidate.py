"""A plan with its prediction, and what a search has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moec.grammar.spec import Spec
from moec.passes.cost.memory import Memory, RankMemory, largest_of, peaks_of_ranks
from moec.passes.cost.prediction import Prediction, predict
from moec.passes.cost.rates import ClusterRates, Rates
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Program
from moec.passes.lower.lower_model import lower
from moec.passes.pipeline import unverified


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan: the file with a value for each of `words`, which it leaves open, its Program and its prediction."""

    spec: Spec
    words: Mapping[str, int | str]
    program: Program
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen plan, the next ones from the fastest on, and the numbers of candidates and of those that fit.

    Where none fits, `chosen` is the one with the least memory.
    """

    chosen: Candidate
    runners_up: tuple[Candidate, ...]
    candidates: int
    fitting: int


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A candidate of which only the memory is predicted: that of each pipeline rank."""

    spec: Spec
    words: Mapping[str, int | str]
    program: Program
    ranks: Sequence[RankMemory]

    @classmethod
    def of(cls, spec: Spec, words: Mapping[str, int | str]) -> PlacedPlan:
        """The plan of a file that states every word; a search chose `words`. Raises `DiagnosticError` as a compilation
        would, but for the memory."""
        degrees = choose_degrees(spec)
        program = unverified(spec, degrees, lower(spec, degrees), "schedule")
        return cls(spec, words, program, peaks_of_ranks(program, spec))

    @property
    def memory(self) -> Memory:
        """That of the rank with the highest peak."""
        return largest_of(self.ranks)

    @property
    def left(self) -> float:
        """The bytes of a device that the peak leaves; negative where it does not fit."""
        return self.spec.cluster.device.memory - max(rank.peak for rank in self.ranks)

    def candidate(self, rates: Rates) -> Candidate:
        """The plan with its time."""
        return Candidate(self.spec, self.words, self.program, predict(self.program, self.spec, rates, self.memory))


def candidate_of(spec: Spec, words: Mapping[str, int | str] | None = None, rates: Rates | None = None) -> Candidate:
    """The plan of `PlacedPlan.of`, with its time; `rates` are by default those that the file's cluster states."""
    return PlacedPlan.of(spec, words or {}).candidate(rates or ClusterRates(spec.cluster))

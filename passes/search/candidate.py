"""A plan with its prediction, and what a search has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moec.grammar.spec import Spec
from moec.passes.cost.memory import memory_of
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


def candidate_of(spec: Spec, words: Mapping[str, int | str] | None = None, rates: Rates | None = None) -> Candidate:
    """The plan of a file that states every word; a search chose `words`. Raises `DiagnosticError` as a compilation
    would, but for the memory."""
    program = _placed(spec)
    return Candidate(spec, words or {}, program, predict(program, spec, rates or ClusterRates(spec.cluster)))


def candidate_that_fits(spec: Spec, words: Mapping[str, int | str], rates: Rates) -> Candidate | None:
    """The plan as `candidate_of` gives it; None, without its time, where its memory exceeds a device's."""
    program = _placed(spec)
    memory = memory_of(program, spec)
    if memory.peak.bytes.total > spec.cluster.device.memory:
        return None
    return Candidate(spec, words, program, predict(program, spec, rates, memory))


def _placed(spec: Spec) -> Program:
    degrees = choose_degrees(spec)
    return unverified(spec, degrees, lower(spec, degrees), "budget")

"""A plan with its prediction, and what a search has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moec.grammar.spec import Spec
from moec.passes.cost.memory import Memory, RankMemory, largest_of, peaks_of_ranks
from moec.passes.cost.prediction import Prediction, predict
from moec.passes.cost.rates import ClusterRates, Rates
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.degrees.degrees import Degrees, choose_degrees
from moec.passes.ir import Program, Recompute
from moec.passes.ir.work.workload import Workload
from moec.passes.lower.lower_model import lower
from moec.passes.partition import Partition
from moec.passes.pipeline import unverified
from moec.passes.place.place import recomputing


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
    """A candidate of which only the memory is predicted: that of each pipeline rank. `costs`: of a micro-batch."""

    spec: Spec
    words: Mapping[str, int | str]
    program: Program
    ranks: Sequence[RankMemory]
    costs: Mapping[str, BlockCost] | None

    @property
    def memory(self) -> Memory:
        """That of the rank with the highest peak."""
        return largest_of(self.ranks)

    @property
    def fits(self) -> bool:
        """Whether each rank's peak fits its device; the other ranks of a plan that does not are not computed."""
        return all(rank.peak <= self.spec.cluster.device.memory for rank in self.ranks)

    def candidate(self, rates: Rates) -> Candidate:
        """The plan with its time."""
        prediction = predict(self.program, self.spec, rates, self.memory, self.costs)
        return Candidate(self.spec, self.words, self.program, prediction)


_Placed = tuple[Program, Sequence[RankMemory], Mapping[str, BlockCost] | None]


class Placements:
    """Places plans of one file as a compilation does. Those with equal meshes and ZeRO stages share a Program until
    layers recompute and stages are cut; those with equal degrees are placed once."""

    def __init__(self) -> None:
        self._uncut = dict[Degrees, Program]()
        self._costs = dict[tuple[Degrees, int], Mapping[str, BlockCost]]()
        self._placed = dict[Degrees, _Placed]()

    def plan(self, spec: Spec, words: Mapping[str, int | str]) -> PlacedPlan:
        """The plan of a file that states every word; a search chose `words`. Raises `DiagnosticError` as a compilation
        would, but for the memory."""
        degrees = choose_degrees(spec)
        key = degrees._replace(stated=frozenset())
        if key not in self._placed:
            self._placed[key] = self._place(spec, degrees)
        return PlacedPlan(spec, words, *self._placed[key])

    def _place(self, spec: Spec, degrees: Degrees) -> _Placed:
        nothing: list[Recompute] = ["none"] * len(degrees.recompute)
        alike = degrees._replace(recompute=tuple(nothing), microbatches=1, stated=frozenset())
        alike = alike._replace(pp=1, virtual=1, schedule=None, last_layers=())
        if alike not in self._uncut:
            self._uncut[alike] = unverified(spec, alike, lower(spec, degrees), "partition")
        program = replace(self._uncut[alike], microbatches=degrees.microbatches)
        workload, key, known = Workload.of_microbatch(spec, program), (alike, degrees.microbatches), None
        if workload.measured is None:  # else costs depend on the layers of a rank
            if key not in self._costs:
                self._costs[key] = costs_of(program, workload)
            known = self._costs[key]
        program = Partition(spec, degrees, known).apply(recomputing(program, degrees.recompute))
        costs = None if known is None else costs_of(program, workload, known)
        return program, peaks_of_ranks(program, spec, known=costs), costs


def candidate_of(spec: Spec, words: Mapping[str, int | str] | None = None, rates: Rates | None = None) -> Candidate:
    """The plan of `Placements.plan`, with its time; `rates` are by default those that the file's cluster states."""
    return Placements().plan(spec, words or {}).candidate(rates or ClusterRates(spec.cluster))

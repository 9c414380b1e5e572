"""Scores of predictions: errors of the rate, rank order, and which of two layouts is faster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moec.grammar import load_text
from moec.grammar.spec import Spec
from moec.passes.cost.exchange import Exchange
from moec.passes.cost.groups import Group
from moec.passes.cost.rates import ClusterRates, Contents
from moec.passes.cost.seconds import Seconds
from moec.passes.cost.step_time import step_seconds
from moec.passes.cost.totals import BlockCost, costs_of, tally
from moec.passes.ir import Program
from moec.passes.ir.work.cost import Choices, Collective
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program
from planning.rows import Published

APART = 0.05
"""Layouts whose published rates are nearer than this are no pair: the same recipe measured twice differs by as much."""

HOST = 25.0
"""Megatron's host over that of moec's kernels at 5 µs each, where shapes follow from routing: 9 ms for a layer of
Qwen3-30B, by the mxfp8 row of 8 B200 with one sequence a micro-batch, whose error does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row with its published and its predicted MFU: forward and backward of the model, over the bf16 peak."""

    row: Published
    published: float
    predicted: float
    seconds: float

    @property
    def error(self) -> float:
        """Of the rate: positive where the prediction is too fast."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, slots=True)
class Run:
    """A row and its Program up to the budget, which might refuse it, with the cost of each block."""

    row: Published
    spec: Spec
    program: Program
    costs: Mapping[str, BlockCost]

    @classmethod
    def of(cls, row: Published) -> Run:
        """Raises `DiagnosticError` where moec refuses the file."""
        spec = load_text(row.text, name="published.moe").unwrap()
        program = compile_program(spec, stop_after="schedule").program
        return cls(row, spec, program, costs_of(program, Workload.of_microbatch(spec, program)))

    @property
    def rates(self) -> AsRun:
        exchange = Exchange(once_per_node=self.row.once_per_node)
        is_fsdp = self.spec.parallel.zero == 3
        return AsRun(self.spec.cluster, is_fsdp=is_fsdp, dropless=self.row.dropless, exchange=exchange)

    def step(self, rates: AsRun | None = None) -> Seconds:
        return step_seconds(self.costs, self.program, self.spec, rates or self.rates)

    def scored(self, rates: AsRun | None = None) -> Scored:
        row, seconds, counts = self.row, self.step(rates).total, tally(self.program, self.spec)
        peak = self.spec.cluster.device.peak.bf16
        assert peak is not None
        least = counts.flops_per_token * counts.tokens / (peak * self.spec.cluster.ranks)
        if row.step is not None:
            published = least / row.step
        else:
            published = row.mfu if row.mfu is not None else (row.tflops or 0.0) * 1e12 / peak
        return Scored(row=row, published=published, predicted=least / seconds, seconds=seconds)


def predicted(row: Published) -> Scored:
    """Compiles the row and predicts its step. Raises `DiagnosticError` where moec refuses the file."""
    return Run.of(row).scored()


@dataclass(frozen=True, slots=True)
class AsRun(ClusterRates):
    """The rates of a cluster where Megatron or FSDP trains instead of moec.

    Megatron's products add gradients to fp32 ones, which takes 8 of the 18 bytes that moec's kernels move; its
    positions and its loss are one kernel each. FSDP sums gradients in bf16, and copies what it gathers and sums between
    flat buffers and tensors.
    """

    is_fsdp: bool = False
    dropless: bool = False

    def launched(self, kernels: float) -> float:
        return ClusterRates.launched(self, kernels * (HOST if self.dropless else 1))

    def moved_again(self, size: float) -> float:
        return 0.0

    def copied(self, size: float) -> float:
        return ClusterRates.copied(self, size) * 8 / 18

    def collective(
        self, collective: Collective, sent: float, group: Group, choices: Choices | None = None, of: Contents = "values"
    ) -> float:
        if not self.is_fsdp or of == "values":
            return ClusterRates.collective(self, collective, sent, group, choices, of)
        sent = sent / 2 if of == "gradients" else sent
        copied = 2 * sent * group.ranks / max(group.ranks - 1, 1)
        return ClusterRates.collective(self, collective, sent, group, choices, of) + self.moved(copied)


@dataclass(frozen=True, slots=True)
class Score:
    """Of some rows, the errors as fractions. `tau` is None of fewer than two rows."""

    rows: int
    mean: float
    worst: float
    signed: float
    tau: float | None


def score(rows: Sequence[Scored]) -> Score:
    errors = [row.error for row in rows]
    return Score(
        len(rows),
        statistics.fmean(map(abs, errors)),
        max(errors, key=abs),
        statistics.fmean(errors),
        kendall([row.published for row in rows], [row.predicted for row in rows]),
    )


def kendall(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Kendall's τ: pairs in the same order minus pairs in the other, over the pairs that `left` does not tie."""
    pairs = itertools.combinations(zip(left, right, strict=True), 2)
    signs = [(a - c) * (b - d) for (a, b), (c, d) in pairs if a != c]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs) if signs else None


def winners(rows: Sequence[Scored]) -> list[tuple[Scored, Scored, bool]]:
    """The pairs that differ in layout alone, by more than `APART`: the faster first, and whether it is predicted."""
    found = []
    for one, other in itertools.combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: row.published, reverse=True)
        is_pair = one.row.twins == other.row.twins and one.row.text != other.row.text
        if is_pair and fast.published > (1 + APART) * slow.published:
            found.append((fast, slow, fast.predicted > slow.predicted))
    return found

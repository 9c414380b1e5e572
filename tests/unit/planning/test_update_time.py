"""What Muon and Adafactor compute and exchange beside reading gradients and writing parameters, counted by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from support.tables import each_row

from moec.driver import run_passes, to_spec
from moec.passes.cost.groups import Group
from moec.passes.cost.rates import ClusterRates
from moec.passes.cost.totals import costs_of, runs_on
from moec.passes.cost.update_time import update_seconds
from moec.passes.ir.work.cost import Product
from moec.passes.ir.work.workload import Workload

TEXT = """
model "small" {{
  vocab = 64; dim = 16; depth = {depth}; context = 8; dtype = bf16
  layers {{ attention = mha(heads = 4, rope = rope()); moe {{ experts = 4 * swiglu(32); gate = topk(2) }} }}
}}
cluster "two" {{ device = h100; level "node" {{ size = {ranks} }} }}
train {{ batch = 8; sequence = 8; optimizer = {optimizer}(lr = 1e-3) }}
parallel {{ tp = {tp}; ep = {ep}; zero = 0 }}
"""
ATTENTION, EXPERTS = 4 * (4 * 16**3 + 2 * 16**3), 4 * 3 * (4 * 16**2 * 32 + 2 * 16**3)
"""FLOPs of an iteration: 4 s² l + 2 s³ for each matrix of s × l. A layer has 4 of 16 × 16, and 4 experts of 3."""


@dataclass(frozen=True, slots=True)
class Counted(ClusterRates):
    """Rates under which a FLOP takes a second and all else nothing; what collectives send is counted, one way."""

    sent: Counter[tuple[str, int]] = field(default_factory=Counter)

    def product(self, product: Product, *, backward: bool) -> float:
        return product.flops

    def moved(self, size: float) -> float:
        return 0.0

    def updated(self, size: float) -> float:
        return 0.0

    def collective(self, collective, sent, group: Group, choices=None, of="values") -> float:
        self.sent[collective, group.ranks] += sent
        return 0.0


def counted(optimizer: str, **sizes: int) -> tuple[float, Counter[tuple[str, int]]]:
    spec = to_spec(TEXT.format(optimizer=optimizer, **{"depth": 2, "ranks": 1, "tp": 1, "ep": 1} | sizes))
    program = run_passes(spec, "schedule").program
    rates = Counted(spec.cluster)
    runs = runs_on(program, costs_of(program, Workload.of_microbatch(spec, program)))
    return update_seconds(runs, spec.update, rates), rates.sent


@each_row(
    "sizes, flops, sent",
    [
        ({}, 2 * (ATTENTION + EXPERTS), {}),
        ({"ranks": 2, "ep": 2}, 2 * (ATTENTION + EXPERTS / 2), {}),
        # Of 8 matrices that two ranks share, each gets 4: half of each, in bf16, comes, and later goes.
        ({"ranks": 2, "tp": 2, "ep": 2}, ATTENTION + EXPERTS, {("all_to_all", 2): 4 * 256 / 2 * 2}),
        # Of 4 matrices that four ranks share, each gets one.
        ({"depth": 1, "ranks": 8, "tp": 4}, ATTENTION / 4 + EXPERTS, {("all_to_all", 4): 256 * 3 / 4 * 2}),
    ],
)
def test_muon_orthogonalises_whole_matrices_on_one_of_their_ranks(sizes, flops, sent) -> None:
    assert counted("muon", **sizes) == (pytest.approx(5 * flops), sent)


def test_adafactor_reduces_sums_of_rows_and_columns_and_whole_matrices() -> None:
    """Of the parts of two ranks. Over rows that are cut: 16 columns, a factor, and squares of gradient and weight; over
    columns, 16 rows instead and no factor. The squares of updates are reduced later."""
    assert counted("adafactor") == (0, {})
    _, sent = counted("adafactor", ranks=2, tp=2, ep=2, depth=1)
    queries_keys_values_embedding_head, out = 5 * (16 + 1 + 2), 16 + 2
    assert sent == {("all_reduce", 2): 4 * (queries_keys_values_embedding_head + out + 6)}

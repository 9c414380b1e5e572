"""Bytes that a step sends for weights and gradients: what micro-batches and recomputation repeat."""

from __future__ import annotations

import pytest
from support.plans import moe_plan
from support.tables import each_row

from moec.passes.cost.totals import tally


def sent(**options: object) -> dict[tuple[str, str], float]:
    """Bytes by purpose and group."""
    plan = moe_plan(ranks=4, ep=2, tp=None, batch=16, **options)
    return {(flow.purpose, flow.group): flow.bytes for flow in tally(plan.program, plan.spec).traffic}


@each_row(("zero", "gathers", "scatters"), [(1, 1, 1), (2, 1, 4), (3, 4, 4)])
def test_micro_batches_repeat_what_zero_sends_for_each(zero: int, gathers: int, scatters: int) -> None:
    one, four = sent(zero=zero), sent(zero=zero, microbatches=4)
    for key, size in one.items():
        times = {"all_gather of weights": gathers, "reduce_scatter of gradients": scatters}.get(key[0], 1)
        assert four[key] == pytest.approx(times * size), key


def test_zero_3_gathers_all_weights_twice_but_the_embeddings_table() -> None:
    key = ("all_gather of weights", "dp")
    table = 32 * 16 * 4 * 3 / 4  # no backward reads it
    assert sent(zero=3)[key] == pytest.approx(2 * sent(zero=1)[key] - table)
    experts = ("all_gather of weights", "edp[1..2]")
    assert sent(zero=3)[experts] == pytest.approx(2 * sent(zero=1)[experts])


def test_a_recomputed_layer_sends_its_rows_again() -> None:
    once, again = sent(), sent(recompute="layer")
    key = ("all_to_all of rows", "ep[1..2]")
    assert again[key] == pytest.approx(1.5 * once[key])  # forward, forward again, backward
    assert sent(recompute="experts") == once

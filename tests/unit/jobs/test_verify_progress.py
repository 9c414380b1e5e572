"""The progress of a verification: every layer is told, in order, and the end is the end."""

from __future__ import annotations

import re

import pytest
from support.plans import moe_plan

from moec.runtime.verify.verification import verify


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"dtype": "fp32", "ranks": 2, "ep": 2}, ["float64", "rounding in fp32"]),
        ({"dtype": "bf16", "ranks": 2, "ep": 2}, ["float64", "rounding in bf16", "float32"]),
    ],
    ids=["fp32", "bf16"],
)
def test_every_layer_of_every_run_is_told_and_steps_only_grow(options: dict[str, object], runs: list[str]) -> None:
    told: list[tuple[str, int, int]] = []
    plan = moe_plan(**options)
    assert verify(plan, progress=lambda *step: told.append(step)).ok
    assert list(dict.fromkeys(re.split("[,:]", what)[0] for what, _, _ in told)) == runs
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert {total for _, _, total in told} == {told[0][2]}
    assert 0.7 < done[-1] / told[0][2] <= 1
    for run in runs:
        assert next(what for what, _, _ in told if what.startswith(run)) == f"{run}: the unsharded model"
        for layer in (1, 2, 3):
            assert any(what.startswith(f"{run}, 2 ranks: forward, layer {layer} of 3") for what, _, _ in told)
        assert any(what.startswith(f"{run}, 2 ranks: backward, layer 2 of 3") for what, _, _ in told)


def test_toy_widths_are_told() -> None:
    told: list[str] = []
    verify(moe_plan(ranks=2, ep=2), scale=True, progress=lambda what, done, total: told.append(what))
    assert all(what.startswith("float64, at toy widths") for what in told)

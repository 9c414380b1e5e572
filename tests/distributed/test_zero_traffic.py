"""The bytes that a step sends for weights and gradients under ZeRO: counted on gloo ranks, and stated by `tally`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.gloo_pool import GlooPool
from torch import Tensor

import moec
from moec.passes.cost.totals import tally
from moec.runtime.weights import gathering, gradients

PURPOSES = {"all_gather": "all_gather of weights", "reduce_scatter": "reduce_scatter of gradients"}


def bytes_sent(options: dict[str, Any]) -> dict[str, float]:
    """The bytes that leave this rank in one step, by collective; a ring sends n − 1 of n parts."""
    found: dict[str, float] = defaultdict(float)

    def counting(name: str, run: Any) -> Any:
        def call(into: Tensor, source: Tensor, *arguments: Any, **more: Any) -> Any:
            found[PURPOSES[name]] += abs(into.nbytes - source.nbytes)
            return run(into, source, *arguments, **more)

        return call

    with moec.launch(moe_plan(**options), device="cpu") as job, pytest.MonkeyPatch.context() as monkeypatch:
        model = job.build(seed=1)
        given = contract.mine(job, *contract.batch())
        for module, name in ((gathering, "all_gather"), (gradients, "reduce_scatter")):
            whole = f"{name}_single"
            monkeypatch.setattr(module, whole, counting(name, getattr(module, whole)))
        job.step(model, *given)
    return dict(found)


@pytest.mark.parametrize(
    "words", [{"zero": 1}, {"zero": 3, "recompute": "layer"}, pytest.param({"zero": 3}, marks=pytest.mark.slow)]
)
def test_the_stated_traffic_of_zero_is_what_ranks_send(gloo: GlooPool, words: dict[str, Any]) -> None:
    options: dict[str, Any] = {"ranks": 2, "ep": None, "mixtures": ((8, 2), (8, 1)), **words}
    plan, stated = moe_plan(**options), defaultdict[str, float](float)
    for flow in tally(plan.program, plan.spec).traffic:
        stated[flow.purpose] += flow.bytes
    gathers, scatters = PURPOSES.values()
    for found in gloo.run(2, bytes_sent, options, initialize=False):
        assert found[gathers] == pytest.approx(stated[gathers], rel=1e-6)
        counts = 4 * len(plan.parameters)  # at most a number per parameter, to the other rank
        assert stated[scatters] <= found[scatters] <= stated[scatters] + counts

"""What `repr` shows of a model on ranks: communicates nothing, and works on any rank alone."""

from __future__ import annotations

import copy
from typing import Any

from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool

import moec


def shown(options: dict[str, Any]) -> dict[str, str]:
    """The texts of one rank: rank 0 alone shows its model first, so that a collective would stall."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build()
        texts = {"alone": repr(model)} if job.rank == 0 else {}
        texts |= {"model": repr(model), "copy": repr(copy.deepcopy(model)), "meta": repr(job.build("meta"))}
        texts["job"] = repr(job)
    return texts | {"ended": repr(model), "ended job": repr(job)}


def test_a_model_shows_this_ranks_part_of_each_parameter(gloo: GlooPool) -> None:
    results = gloo.run(4, shown, {"ranks": 4, "experts": 8, "ep": 4})
    for rank, texts in enumerate(results):
        assert f"rank {rank} of 4" in texts["model"]
        assert "here [2, " in texts["model"]  # of 8 experts
        assert texts["model"] == texts["copy"] == texts["meta"] == texts["ended"]
        assert f"running, rank {rank} of 4" in texts["job"]
        assert "ended" in texts["ended job"]
    assert results[0]["alone"] == results[0]["model"]

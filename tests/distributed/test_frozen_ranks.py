"""A base in bf16 that a plan freezes, on gloo ranks: ranks do not change it, and keep no fp32 of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.gloo_pool import GlooPool

import moec
from moec.runtime.weights.masters import local_part

FROZEN = "embedding, attention, norms, ffn, shared, head"
OPTIONS = {"dtype": "bf16", "expert": "lora(3, alpha = 6)", "beside": "shared = swiglu(8)"}


def train_over_a_frozen_base(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two steps with clipping, and what the ranks then have; the last loss again after a load into a new model."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        before = {name: local_part(p).clone() for name, p in model.named_parameters()}
        given = contract.mine(job, *contract.batch())
        losses, norms = [], []
        for _ in range(2):
            losses.append(job.step(model, *given, microbatches=2).item())
            norms.append(float(job.clip_grad_norm_(model, 1.0)))
            optimizer.step()
            trained = {name for name, p in model.named_parameters() if p.grad is not None}
            optimizer.zero_grad()
        job.check_replicas(model)
        job.save(folder, model, optimizer).wait()
        again = job.build(seed=7)
        job.load(folder, again, job.optimizer(again))
        for name, parameter in model.named_parameters():
            assert torch.equal(local_part(parameter), local_part(again.get_parameter(name))), name
        return {
            "losses": [*losses, job.step(again, *given).item()],
            "norms": norms,
            "trained": trained,
            "changed": {n for n, p in model.named_parameters() if not torch.equal(local_part(p), before[n])},
            "narrow": {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16},
            "sharded": {name for name, p in model.named_parameters() if local_part(p).numel() < p.numel()},
        }


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [
        ({"ranks": 2, "ep": 2}, 3),
        pytest.param({"ranks": 4, "tp": 2, "ep": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "tp": 2, "ep": 2}, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_over_a_frozen_base_in_bf16_ranks_train_as_one_and_do_not_change_it(
    gloo: GlooPool, tmp_path: Path, degrees: dict[str, int], zero: int
) -> None:
    options = {**OPTIONS, "optimizer": f"adamw(lr = 1e-2); frozen = [{FROZEN}]"}
    alone = gloo.run(1, train_over_a_frozen_base, {**options, "ranks": 1, "ep": 1}, str(tmp_path / "one"))[0]
    sharded = {**options, **degrees, "zero": zero}
    for result in gloo.run(degrees["ranks"], train_over_a_frozen_base, sharded, str(tmp_path / "ranks")):
        assert result["losses"] == pytest.approx(alone["losses"], abs=2e-2)
        assert result["norms"] == pytest.approx(alone["norms"], rel=0.05)
        experts_and_gates = {name for name in result["trained"] if ".moe.experts." in name or ".moe.gate." in name}
        assert result["trained"] == experts_and_gates == alone["trained"] >= result["changed"]
        assert result["changed"]
        assert result["narrow"] == alone["narrow"]
        assert result["narrow"].isdisjoint(result["trained"])
        assert len(result["narrow"]) + len(result["trained"]) == len(moe_plan(**sharded).parameters)
        assert ("layers.0.attention_norm.weight" in result["sharded"]) == (zero == 3)

"""`job.metrics` on several ranks: the first one writes, all take part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches, own_part

import moec
from moec.runtime.errors import JobError


def train(path: str) -> dict[str, Any]:
    plan = moe_plan(ranks=4, tp=2, ep=2, beside="capacity = factor(0.5)")
    with moec.launch(plan, device="cpu") as job, job.metrics(path, every=2) as metrics:
        model = job.build(seed=1)
        before = job.collective_seconds
        records = []
        for tokens, labels in batches(32, 8, 8, 4):
            mine = own_part(job, tokens, labels)
            records.append(metrics.step(model, job.step(model, *mine)))
        return {"records": records, "loads": job.expert_loads(model), "seconds": job.collective_seconds - before}


def test_the_first_rank_alone_writes_loads_and_tokens_of_all(gloo: GlooPool, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    results = gloo.run(4, train, str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert [line["tokens"] for line in lines] == [128, 256]
    assert all(result["records"] == [None] * 4 for result in results[1:])
    loads = results[0]["loads"]
    skews = {str(layer): float(load.max() / load.float().mean()) for layer, load in loads.items()}
    assert lines[-1]["load"] == pytest.approx(skews, rel=1e-6)
    assert all(0 < rate < 1 for rate in lines[-1]["drop_rate"].values())
    assert all(result["seconds"] > 0 for result in results)
    assert 0 < sum(line["collective_seconds"] for line in lines) <= results[0]["seconds"]


def tokens_of_uneven_parts() -> tuple[int, int]:
    """This rank's tokens and all ranks', after a block whose parts are 1 and 3 sequences."""
    with moec.launch(moe_plan(ranks=4, tp=2, ep=2), device="cpu") as job:
        model = job.build(seed=1)
        mine = torch.arange(32).view(4, 8).split([1, 3])[job.data_rank]
        with job.accumulate(model, mine):
            model(mine, mine).loss.backward()
        return job.tokens, job.total_tokens


def test_accumulated_tokens_of_uneven_parts_are_counted_over_all_ranks(gloo: GlooPool):
    assert gloo.run(4, tokens_of_uneven_parts) == [(8, 32), (8, 32), (24, 32), (24, 32)]


def metrics_on_rank_0() -> str:
    with moec.launch(moe_plan(ranks=2, ep=2), device="cpu") as job:
        try:
            job.metrics("never.jsonl" if job.rank == 0 else None)
        except JobError as error:
            return str(error)
    return ""


def test_outputs_on_the_first_rank_alone_are_refused_on_every_rank(gloo: GlooPool) -> None:
    assert all("MOE0713" in words and "job.metrics" in words for words in gloo.run(2, metrics_on_rank_0))


def metrics_but_on_rank_1(path: str, every: int) -> str:
    """The error of a script whose second rank leaves `metrics.step` out."""
    plan = moe_plan(ranks=2, ep=2, layers=[f"attention = mha(heads = 4, window = {keys})" for keys in range(2, 7)])
    with moec.launch(plan, device="cpu") as job, job.metrics(path, every=every) as metrics:
        model = job.build(seed=1)
        tokens = torch.arange(16).view(2, 8)
        try:
            for _ in range(4):
                loss = job.step(model, tokens, tokens)
                if job.rank == 0:
                    metrics.step(model, loss)
        except JobError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("every", [1, 3])
def test_ranks_that_leave_a_measurement_out_are_told_so_on_every_rank(
    gloo: GlooPool, tmp_path: Path, every: int
) -> None:
    """Once gloo got all_reduces of two sizes and ended the processes. Metrics count the keys of each window."""
    first, second = gloo.run(2, metrics_but_on_rank_1, str(tmp_path / "run.jsonl"), every)
    assert first == second
    assert "ranks make different calls: one is at `metrics.step`, another at `start of a step`" in first

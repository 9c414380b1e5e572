"""Replicas that drift apart are named, on every rank alike; replicas that do not are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from models import moe_plan

import moec
from moec.runtime.job.job import local_part
from moec.runtime.job.replicas import bit_hash, replicas

FOLDED = {"ranks": 4, "tp": 2, "ep": 2}
EXPERT, DENSE, SHARDED = "edp", "replicated on all", "tp"


def names(kind: str) -> list[str]:
    """Parameters that lie like this: on expert ranks, on all ranks, or cut over tp."""
    found = []
    for name, data in moe_plan(**FOLDED).parameters.items():
        lies = EXPERT if data.mesh != "dense" else SHARDED if "tp:shard" in str(data.layout) else DENSE
        if lies == kind:
            found.append(name)
    return found


def flip(name: str | None, bad_rank: int, every: int) -> str:
    """One training step, one bit changed on one rank, another step; what this rank then says."""
    plan = moe_plan(**FOLDED)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with moec.launch(plan, device="cpu", check_replicas=every) as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        job.step(model, tokens, tokens)
        optimizer.step()
        if name and job.rank == bad_rank:
            local_part(model.get_parameter(name)).view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        try:
            job.step(model, tokens, tokens)
        except moec.DiagnosticError as error:
            return f"{error.diagnostics[0].code} {error.diagnostics[0].message}"
    return "alike"


def run(gloo: GlooPool, *arguments: Any) -> str:
    said = gloo.run(4, flip, *arguments)
    assert len(set(said)) == 1, said
    return str(said[0])


@pytest.mark.parametrize("every", [1, 2])
def test_replicas_that_train_alike_pass(gloo: GlooPool, every: int):
    assert run(gloo, None, 0, every) == "alike"


@pytest.mark.parametrize("kind", [EXPERT, DENSE, SHARDED])
def test_one_changed_bit_on_one_rank_is_named(gloo: GlooPool, kind: str):
    name = names(kind)[0]
    (peers,) = (ranks for ranks in replicas(moe_plan(**FOLDED), name) if 3 in ranks)
    assert len(peers) == (4 if kind == DENSE else 2)
    said = run(gloo, name, 3, 2)
    drift = "rank 3 differs from ranks 0, 1, 2" if kind == DENSE else "rank 1 and rank 3 differ from each other"
    assert said == f"MOE0704 {name}: {drift}"


@pytest.mark.parametrize("every", [0, 3])
def test_steps_between_checks_are_not_checked(gloo: GlooPool, every: int):
    assert run(gloo, names(DENSE)[0], 3, every) == "alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_hash_sees_a_swap_and_a_signed_zero(dtype: torch.dtype):
    x = torch.tensor([1.0, 2.0, 0.0], dtype=dtype)
    assert torch.equal(bit_hash(x), bit_hash(x.clone()))
    assert not torch.equal(bit_hash(x), bit_hash(x[[1, 0, 2]]))
    assert not torch.equal(bit_hash(x), bit_hash(x * torch.tensor([1.0, 1.0, -1.0], dtype=dtype)))

"""Jobs one after the other, as a script may start them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool

import moec
from moec.runtime.host.reference import reference

TWO: dict[str, Any] = {"ranks": 2, "ep": 2, "batch": 4}
TOKENS = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
SCRIPT = """
import torch
import moec

plan = moec.load("two.plan")
for number in range(3):
    with moec.launch(plan, device="cpu", timeout=30) as job:
        tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
        part = tokens.chunk(job.data_size)[job.data_rank]
        loss = job.build(seed=0)(part[:, :-1], part[:, 1:]).loss
        print(f"job {number} of rank {job.rank}: {loss.item():.4f}\\n", end="", flush=True)
"""


def three_jobs() -> list[float]:
    """The losses of jobs on the same ranks, whose store is the launcher's, as under torchrun."""
    losses = []
    for _ in range(3):
        with moec.launch(moe_plan(**TWO), device="cpu", timeout=30) as job:
            part = TOKENS.chunk(job.data_size)[job.data_rank]
            losses.append(job.build(seed=0)(part[:, :-1], part[:, 1:]).loss.item())
    return losses


def test_one_process_may_run_several_jobs(gloo: GlooPool) -> None:
    """Once the second job found the first job's addresses in the store, and hung. Losses are the unsharded model's."""
    loss = reference(moe_plan(**TWO).spec, seed=0)(TOKENS[:, :-1], TOKENS[:, 1:]).loss.item()
    for losses in gloo.run(2, three_jobs, initialize=False):
        assert losses == pytest.approx([loss] * 3, abs=1e-5)


@pytest.mark.slow
def test_one_process_may_run_several_jobs_under_torchrun(tmp_path: Path) -> None:
    plan = moe_plan(**TWO)
    plan.save(tmp_path / "two.plan")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("job")]
    assert sorted(line.split(":")[0] for line in said) == [f"job {n} of rank {r}" for n in range(3) for r in range(2)]
    loss = reference(plan.spec, seed=0)(TOKENS[:, :-1], TOKENS[:, 1:]).loss
    (found,) = {line.split(": ")[1] for line in said}
    assert float(found) == pytest.approx(loss.item(), abs=1e-4)


def jobs_side_by_side(first_leaves_first: bool) -> tuple[list[float], list[bool]]:
    """Losses of a job before and after another one has left, and whether there is a process group after each."""
    one, other = (moec.launch(moe_plan(ranks=2, **degrees), device="cpu") for degrees in ({"ep": 2}, {"ep": 1}))
    tokens = torch.arange(32).view(4, 8)
    one.__enter__()
    other.__enter__()
    leaving, staying = (one, other) if first_leaves_first else (other, one)
    model = staying.build(seed=0)
    mine = tokens.chunk(staying.data_size)[staying.data_rank]
    losses = [staying.step(model, mine, mine).item()]
    leaving.__exit__(None, None, None)
    groups = [dist.is_initialized()]
    losses.append(staying.step(model, mine, mine).item())
    staying.__exit__(None, None, None)
    return losses, [*groups, dist.is_initialized()]


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_the_last_job_of_a_process_group_ends_it(gloo: GlooPool, first_leaves_first: bool) -> None:
    for (before, after), groups in gloo.run(2, jobs_side_by_side, first_leaves_first, initialize=False):
        assert before == after
        assert groups == [True, False]


def late_in_the_job_with_the_longer_timeout() -> float:
    """Rank 1 is late by more than the timeout of a job that made the group of all ranks and has ended."""
    first = moec.launch(moe_plan(ranks=2, ep=2), device="cpu", timeout=12)
    second = moec.launch(moe_plan(ranks=2, ep=2), device="cpu", timeout=60)
    first.__enter__()
    with second:
        model = second.build(seed=0)
        first.__exit__(None, None, None)
        mine = torch.arange(32).view(4, 8).chunk(2)[second.data_rank]
        if second.rank:
            time.sleep(13)
        return second.step(model, mine, mine).item()


@pytest.mark.slow  # joining a job looks up a name, which can take 5 s: no timeout may be shorter
def test_a_job_has_its_own_timeout_in_a_process_group_that_another_job_made(gloo: GlooPool) -> None:
    first, second = gloo.run(2, late_in_the_job_with_the_longer_timeout, initialize=False)
    assert first == second


def threads_of_a_job() -> tuple[int, int, int]:
    """Threads of this process before a job that makes its process group, in it, and after it; its model stays."""
    counts = [len(os.listdir("/proc/self/task"))]
    with moec.launch(moe_plan(ranks=2, ep=2)) as job:
        model = job.build()
        job.step(model, TOKENS[:, :-1], TOKENS[:, 1:])
        counts.append(len(os.listdir("/proc/self/task")))
    counts.append(len(os.listdir("/proc/self/task")))
    assert model.training
    return counts[0], counts[1], counts[2]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_the_threads_of_gloo_end_with_the_job_and_not_with_the_interpreter(gloo: GlooPool) -> None:
    for before, inside, after in gloo.run(2, threads_of_a_job, initialize=False):
        assert before == after < inside

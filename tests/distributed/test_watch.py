"""A rank that dies, stalls, raises or leaves ends the job with one message that names it."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
import torch
from support.plans import moe_plan
from support.preloaded import environment, python
from support.ranks.gloo_pool import GlooPool
from support.ranks.pairs import in_pairs
from support.scripts import SCRIPTS

import moec
from moec.runtime.errors import RankError

SECONDS = 3.0


def steps_as_rank(what: str) -> str | None:
    """Three steps, in the second of which rank 1 does `what`; returns this rank's error."""
    plan = moe_plan(ranks=2, ep=2)
    try:
        # Who leaves or raises says so at once: on a busy machine no timeout may come before that.
        with moec.launch(plan, device="cpu", timeout=SECONDS if what == "stalls" else 10 * SECONDS) as job:
            model = job.build()
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            for step in range(3):
                if step == 1 and job.rank == 1:
                    if what == "leaves":
                        return None
                    if what == "raises":
                        raise LookupError("no more data")
                    if what == "stalls":
                        time.sleep(1.3 * SECONDS)
                job.step(model, tokens, tokens)
    except (RankError, LookupError) as error:
        return str(error)
    return None


def a_job_of_three() -> None:
    with moec.launch(moe_plan(ranks=3, ep=1, batch=6), device="cpu"):
        pass


@pytest.fixture(scope="module")
def told(gloo: GlooPool) -> dict[str, list[str | None]]:
    """The errors of both ranks, for each way in which rank 1 fails. One process has had a job more than its peer."""
    gloo.run(3, a_job_of_three, initialize=False)
    return in_pairs(gloo, steps_as_rank, ["leaves", "raises", "stalls"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("leaves", "rank 1 left the job before the others; rank 0 waits for it in all_reduce over all ranks, start of"),
        ("raises", "rank 1 ended with LookupError: no more data; rank 0 waits for it in all_reduce over all ranks"),
        ("stalls", r"rank 1 has stalled: it has been in no collective for \d\.\d s, since all_reduce over"),
    ],
)
def test_a_rank_that_leaves_raises_or_stalls_is_named(told: dict[str, list[str | None]], what: str, words: str) -> None:
    first, second = told[what]
    assert first is not None
    assert re.search(words, first), first
    assert second == {"leaves": None, "raises": "no more data", "stalls": first}[what]


def test_a_killed_rank_is_named_once_with_layer_collective_and_line():
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / "killed.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode
    assert done.stderr.count("MOE0705") == 1
    told = r"rank 1 no longer answers .*; rank 0 waits for it in all_to_all over ep\S*, layer 1 \(tiny.moe:\d+\)"
    assert re.search(told, done.stderr), done.stderr
    assert "[rank0]: Traceback" not in done.stderr

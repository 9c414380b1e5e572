"""A saved plan under torchrun: its loss, and one message for each mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.plans import moe_plan

from moec.runtime.host.reference import reference

pytestmark = pytest.mark.slow
"""test_readme.py runs one in `make test` too."""

SCRIPT = """
import sys, torch, moec
plan = moec.load(sys.argv[1])
with moec.launch(plan, device="cpu") as job:
    model = job.build(seed=1)
    tokens = torch.arange(64).reshape(8, 8) % int(sys.argv[2])
    mine = tokens.chunk(job.data_size)[job.data_rank]
    loss = job.step(model, mine, mine)
    if job.rank == 0:
        print(f"loss {loss.item():.6f}", flush=True)
"""


def torchrun(folder: Path, *arguments: str, processes: int, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command, given = [*launcher, str(script), *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, cwd=folder)


def test_torchrun_runs_a_saved_plan(tmp_path: Path):
    options = {"ranks": 2, "ep": 2}
    plan = str(moe_plan(**options).save(tmp_path / "tiny.plan"))
    right = torchrun(tmp_path, plan, "32", processes=2)
    assert right.returncode == 0, right.stderr
    tokens = torch.arange(64).reshape(8, 8) % 32
    loss = reference(moe_plan(**options).spec, seed=1)(tokens, tokens).loss
    assert float(right.stdout.split()[-1]) == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("vocab", "processes", "environment", "said"),
    [("40", 2, {}, "MOE0702"), ("32", 1, {}, "MOE0701"), ("32", 2, {"MOEC_BACKEND": "nonsense"}, "MOE0707")],
)
def test_under_torchrun_each_mistake_is_said_once(
    tmp_path: Path, vocab: str, processes: int, environment: dict[str, str], said: str
):
    plan = str(moe_plan(ranks=2, ep=2).save(tmp_path / "tiny.plan"))
    wrong = torchrun(tmp_path, plan, vocab, processes=processes, **environment)
    assert wrong.returncode == 1
    assert wrong.stderr.count(said) == 1
    assert "Traceback" not in wrong.stderr.split(said)[0]
    assert said != "MOE0701" or "torchrun --standalone --nproc-per-node 2" in wrong.stderr

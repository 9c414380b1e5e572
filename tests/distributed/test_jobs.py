"""Jobs one after the other, as a script may start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from models import moe_plan

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


def test_one_process_may_run_several_jobs(tmp_path: Path) -> None:
    """Once the second job found the first job's addresses in the store, and hung."""
    moe_plan(ranks=2, ep=2, batch=4).save(tmp_path / "two.plan")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("job")]
    assert sorted(line.split(":")[0] for line in said) == [f"job {n} of rank {r}" for n in range(3) for r in range(2)]
    assert len({line.split(": ")[1] for line in said}) == 1

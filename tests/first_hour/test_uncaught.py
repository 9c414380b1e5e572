"""A mistake that a script does not catch is one message at the script's line, alone and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from models import moe_plan

MISTAKE = """\
import moec

moec.launch("a.plan", chekcs="all")
"""

WRONG_BATCH = """\
import torch
import moec

with moec.launch("a.plan", device="cpu") as job:
    model = job.build()
    job.step(model, torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int64))
"""


def ended(folder: Path, script: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    """The script, run in `folder` by Python, or by `launcher`."""
    (folder / "train.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *launcher, "train.py"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_script_ends_with_its_own_line_and_no_traceback(tmp_path: Path) -> None:
    moe_plan(ranks=1, ep=1).save(tmp_path / "a.plan")
    done = ended(tmp_path, MISTAKE)
    assert done.returncode == 1
    assert "train.py:3:" in done.stderr
    assert "did you mean `checks`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_that_is_wrong_on_all_ranks_is_printed_once_under_torchrun(tmp_path: Path) -> None:
    moe_plan(ranks=2, ep=2).save(tmp_path / "a.plan")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = ended(tmp_path, WRONG_BATCH, *launcher)
    assert done.returncode == 1
    assert done.stderr.count("error[MOE0702]") == 1
    assert "train.py:6:" in done.stderr

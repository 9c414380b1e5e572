"""A mistake that a script does not catch is one message at the script's line, alone and under torchrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.plans import moe_plan
from support.preloaded import environment, python

from moec.runtime.errors import wrong_argument
from moec.runtime.uncaught import _print

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

WRONG_ON_RANK_1 = """\
import torch
import moec
from moec.runtime import uncaught

uncaught.OWN_ERROR_SECONDS = 0.5
good = torch.zeros(4, 8, dtype=torch.int64)
with moec.launch("a.plan", device="cpu") as job:
    model = job.build()
    if job.rank == 1:
        job.step(model, good.int(), good)
    job.step(model, good, good)
"""

CLIPPED_BY_TORCH = """\
import torch
import moec

tokens = torch.zeros(4, 8, dtype=torch.int64)
with moec.launch("a.plan", device="cpu") as job:
    model = job.build()
    job.step(model, tokens, tokens)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""

BACKWARD_AGAIN = """\
import torch
import moec

tokens = torch.zeros(4, 8, dtype=torch.int64)
with moec.launch("a.plan", device="cpu") as job:
    model = job.build()
    job.step(model, tokens, tokens).backward()
"""

DICT_FOR_A_MODEL = """\
import torch
import moec

tokens = torch.zeros(4, 8, dtype=torch.int64)
with moec.launch("a.plan", device="cpu") as job:
    job.build()(**{"input_ids": tokens})
"""

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def ended(folder: Path, script: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    """The script, run in `folder` by Python, or by `launcher`."""
    (folder / "train.py").write_text(script)
    command = [python(), *launcher, "train.py"]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )


def test_a_script_ends_with_its_own_line_and_no_traceback(tmp_path: Path) -> None:
    moe_plan(ranks=1, ep=1).save(tmp_path / "a.plan")
    done = ended(tmp_path, MISTAKE)
    assert done.returncode == 1
    assert "train.py:3:" in done.stderr
    assert "did you mean `checks`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "help"),
    [(BACKWARD_AGAIN, "`job.step` has run it already"), (DICT_FOR_A_MODEL, "call it as `model(tokens, labels)`")],
    ids=["backward", "forward"],
)
def test_an_error_of_torch_ends_with_how_it_is_called_here(tmp_path: Path, script: str, help: str) -> None:
    moe_plan(ranks=1, ep=1).save(tmp_path / "a.plan")
    done = ended(tmp_path, script)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert help in done.stderr.splitlines()[-1]


def test_a_message_is_wrapped_in_a_terminal_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = wrong_argument("a message", "a sentence with many words and a way out, " * 3)
    _print(error, None)
    assert max(map(len, capfd.readouterr().err.splitlines())) > 100
    monkeypatch.setattr(os, "get_terminal_size", lambda stream: os.terminal_size((60, 20)))
    _print(error, None)
    assert max(map(len, capfd.readouterr().err.splitlines())) <= 60


def test_a_batch_that_is_wrong_on_all_ranks_is_printed_once_under_torchrun(tmp_path: Path) -> None:
    moe_plan(ranks=2, ep=2).save(tmp_path / "a.plan")
    done = ended(tmp_path, WRONG_BATCH, *TWO_RANKS)
    assert done.returncode == 1
    assert done.stderr.count("error[MOE0702]") == 1
    assert "train.py:6:" in done.stderr


def test_a_mistake_of_another_rank_is_shown_at_its_line_and_not_at_rank_0s(tmp_path: Path) -> None:
    moe_plan(ranks=2, ep=2).save(tmp_path / "a.plan")
    done = ended(tmp_path, WRONG_ON_RANK_1, *TWO_RANKS)
    assert done.stderr.count("error[MOE0702]") == 1
    assert "rank 1, step 1: tokens are torch.int32" in done.stderr
    assert "(at train.py:10)" in done.stderr
    assert "train.py:11" not in done.stderr


def test_clipping_of_torch_on_several_ranks_ends_with_the_jobs_own(tmp_path: Path) -> None:
    moe_plan(ranks=2, ep=2).save(tmp_path / "a.plan")
    done = ended(tmp_path, CLIPPED_BY_TORCH, *TWO_RANKS)
    assert done.returncode == 1
    assert "call `job.clip_grad_norm_(model, max_norm)`" in done.stderr


SEVERAL_JOBS = """\
import moec

for _ in range(3):
    with moec.launch("a.plan", device="cpu"):
        pass
raise LookupError("no data")
"""


def test_a_traceback_has_one_prefix_however_many_jobs_a_process_had(tmp_path: Path) -> None:
    moe_plan(ranks=1, ep=1).save(tmp_path / "a.plan")
    (tmp_path / "train.py").write_text(SEVERAL_JOBS)
    done = subprocess.run(
        [python(), "train.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr.rstrip().endswith("\n[rank0]: LookupError: no data")
    assert "[rank0]: [rank0]" not in done.stderr

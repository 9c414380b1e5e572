"""`job.checkpoint(on_signal=…)`: a signal saves, ends every rank, and is lost nowhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from support.preloaded import environment, python
from support.ranks.checkpoints import plan_of
from support.scripts import SCRIPTS

import moec

ENDED = -signal.SIGTERM


class Run(NamedTuple):
    """What all jobs did. `endings`: of each case and rank, exit status and trained steps."""

    folder: Path
    endings: dict[str, list[list[object]]]
    errors: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, script = tmp_path_factory.mktemp("signals"), SCRIPTS / "ended_by_signal.py"
    done = subprocess.run([python(), str(script), str(folder)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Run(folder, dict(json.loads(line) for line in done.stdout.splitlines()), done.stderr)


@pytest.mark.parametrize("case", ["one rank", "all ranks, twice"])
def test_a_signal_in_a_long_step_saves_and_then_ends_every_rank(run: Run, case: str) -> None:
    assert run.endings[case] == [[ENDED, [0, 1]]] * 2
    require_complete(run.folder / case, 2)


def test_a_signal_during_the_last_wait_takes_effect_after_it(run: Run) -> None:
    assert run.endings["in the wait"] == [[ENDED, [0, 1, 2]]] * 2
    require_complete(run.folder / "in the wait", 3)


def test_a_signal_to_a_worker_of_the_data_too_saves_all_the_same(run: Run) -> None:
    assert run.endings["with a worker"] == [[ENDED, [0, 1]]]
    require_complete(run.folder / "with a worker", 2)


def test_a_signal_after_the_last_call_ends_the_process(run: Run) -> None:
    assert run.endings["after the last call"] == [[ENDED, [0, 1, 2]]]


def test_an_error_after_a_signal_is_printed_before_the_end(run: Run) -> None:
    assert run.endings["failure"] == [[ENDED, [0, 1]]]
    assert "LookupError: no more data" in run.errors
    assert run.endings["full disk"] == [[ENDED, [0, 1]]]
    assert "error[MOE0804]" in run.errors
    assert moec.latest(run.folder / "full disk") is None


def test_no_rank_is_blamed(run: Run) -> None:
    assert "MOE0705" not in run.errors


def require_complete(folder: Path, step: int) -> None:
    """One checkpoint, that of `step`, and it loads on another number of ranks."""
    assert os.listdir(folder) == [str(step)]
    with moec.launch(plan_of({"ranks": 1, "ep": 1}), device="cpu") as job:
        model = job.build(seed=2)
        assert job.resume(folder, model, job.optimizer(model)) == step

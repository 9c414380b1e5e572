"""Saving to a disk that is slow, full or broken: steps go on, later saves and the end of the job wait."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.preloaded import environment, python
from support.ranks.checkpoints import plan_of, train, values_of
from support.ranks.gloo_pool import GlooPool
from support.scripts import SCRIPTS
from support.scripts.killed_on_a_slow_disk import SYNCS

import moec
from moec.runtime.checkpoint.format.temporary import MARK
from moec.runtime.errors import JobError

ALONE = {"ranks": 1, "ep": 1}
TWO = {"ranks": 2, "ep": 2}
SOON = 0.3
"""Seconds after which the disk goes on."""


def on_a_slow_disk(folder: Path) -> dict[str, Any]:
    """Every sync waits until `disk` is set. What is done and what is the last checkpoint, at four moments."""
    disk, plain, said = threading.Event(), os.fsync, dict[str, Any]()

    def slow(file: int) -> None:
        assert disk.wait(60)
        plain(file)

    def last() -> str:
        found = moec.latest(folder)
        return found.name if found else ""

    with mock.patch.object(os, "fsync", slow):
        with moec.launch(plan_of(TWO), device="cpu") as job:
            model = job.build(seed=1)
            optimizer = job.optimizer(model)
            first = job.save(folder / "1", model, optimizer)
            train(job, model, optimizer, 0, 3)
            said["during three steps"] = first.done, last()
            threading.Timer(SOON, disk.set).start()
            second = job.save(folder / "2", model, optimizer)
            said["at the second save"] = first.done
            second.wait()
            said["after both"] = last()
            disk.clear()
            train(job, model, optimizer, 3, 1)
            saved = values_of(model, optimizer)
            job.save(folder / "3", model, optimizer)
            threading.Timer(SOON, disk.set).start()
        said["after the job"] = last()
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=2)
        optimizer = job.optimizer(model)
        job.load(folder / "3", model, optimizer)
        found = values_of(model, optimizer)
        said["same"] = found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in found)
    return said


def test_steps_go_on_and_the_next_save_and_the_end_of_the_job_wait_for_a_slow_disk(
    gloo: GlooPool, tmp_path: Path
) -> None:
    expected = {
        "during three steps": (False, ""), "at the second save": True, "after both": "2", "after the job": "3",
        "same": True,
    }  # fmt: skip
    assert gloo.run(2, on_a_slow_disk, tmp_path, initialize=False) == [expected] * 2
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"]


def test_a_kill_in_any_sync_leaves_the_checkpoint_before_it_or_the_whole_new_one(tmp_path: Path) -> None:
    script = SCRIPTS / "killed_on_a_slow_disk.py"
    done = subprocess.run(
        [python(), str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    for number, sync in enumerate(SYNCS):
        folder = tmp_path / str(number)
        last = 2 if sync == "folder of the folder" else 1
        hidden = [name for name in os.listdir(folder) if name.startswith(f".2{MARK}")]
        assert len(hidden) == (1 if last == 1 else 0), sync
        with moec.launch(plan_of(ALONE), device="cpu") as job:
            model = job.build(seed=2)
            optimizer = job.optimizer(model)
            assert moec.latest(folder) == folder / str(last), sync
            assert job.resume(folder, model, optimizer) == last, sync
            train(job, model, optimizer, last, 1)
            job.save(folder / str(last + 1), model, optimizer).wait()
            assert {*hidden} <= {*os.listdir(folder)}, sync
            train(job, model, optimizer, last + 1, 1)
            job.checkpoint(folder, model, optimizer, every=1, keep=2)
        assert sorted(os.listdir(folder)) == [str(last + 1), str(last + 2)], sync


@pytest.mark.parametrize("number", range(len(SYNCS)), ids=SYNCS)
def test_a_full_disk_is_raised_wherever_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some file systems notice only in a sync that there is no space."""
    plain, count = os.fsync, 0

    def full(file: int) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file)

    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(JobError, match=r"MOE0804.*No space left on device") as error:
            job.save(tmp_path / "1", model, optimizer).wait()
        assert ("1 is written, but" in str(error.value)) == (SYNCS[number] == "folder of the folder")
        train(job, model, optimizer, 0, 1)
        job.save(tmp_path / "2", model, optimizer).wait()
    # The last sync comes after the rename: the checkpoint is whole, but might not outlive a power cut.
    assert sorted(os.listdir(tmp_path)) == (["1", "2"] if SYNCS[number] == "folder of the folder" else ["2"])

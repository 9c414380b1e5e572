"""Errors of checkpoints on one rank: what they say, and that their cause is kept."""

from __future__ import annotations

import errno
import os
import shutil
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest

import moec
from moec.runtime.checkpoint import content, loading
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job


def failing(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError(), TypeError("a bug")], ids=repr)
def test_a_copy_that_fails_is_the_cause_of_the_saves_error(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(content, "host_copies", failing(error))
    saving = job.save(tmp_path / "1", job.build())
    with pytest.raises(JobError, match=r"MOE0812.*a copy to host memory failed") as raised:
        saving.wait()
    assert raised.value.__cause__ is error
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("error", [MemoryError(), TypeError("a bug")], ids=repr)
def test_an_unexpected_error_is_the_cause_of_the_loads_error(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model = job.build()
    job.save(tmp_path / "1", model).wait()
    monkeypatch.setattr(loading, "read_extras", failing(error))
    with pytest.raises(JobError, match=f"MOE0812.*{type(error).__name__}") as raised:
        job.load(tmp_path / "1", model)
    assert raised.value.__cause__ is error


class Broken(UserDict[str, Any]):
    """A state, or a dict, that takes no values."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: Any) -> None:
        raise KeyError("cursor")

    def clear(self) -> None:
        raise TypeError("this dict is read-only")


def test_an_error_of_the_scripts_own_object_is_the_cause(job: Job, tmp_path: Path) -> None:
    model = job.build()
    job.save(tmp_path / "1", model, loader=Broken(), progress={"epoch": 1}).wait()
    with pytest.raises(JobError, match=r"MOE0809.*loader.load_state_dict raised KeyError: 'cursor'") as raised:
        job.load(tmp_path / "1", model, loader=Broken())
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(JobError, match=r"MOE0809.*progress.clear or progress.update raised TypeError") as raised:
        job.load(tmp_path / "1", model, progress=Broken())
    assert isinstance(raised.value.__cause__, TypeError)


def test_old_checkpoints_that_cannot_be_removed_are_a_warning(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = job.build()
    job.save(tmp_path / "1", model).wait()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", failing(OSError(errno.EPERM, os.strerror(errno.EPERM))))
        saving = job.save(tmp_path / "2", model, keep=1)
        with pytest.warns(UserWarning, match=r"2 is written, but `keep` could not remove .*1: Operation not") as said:
            saving.wait()
    assert [warning.filename for warning in said] == [__file__]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing(OSError(errno.EIO, os.strerror(errno.EIO))))
        saving = job.save(tmp_path / "3", model, keep=1)
        with pytest.warns(UserWarning, match=r"3 is written, but .*Input/output"):
            job.save(tmp_path / "4", model).wait()
    assert moec.latest(tmp_path) == tmp_path / "4"

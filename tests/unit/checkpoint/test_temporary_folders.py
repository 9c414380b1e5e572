"""Temporary folders of checkpoints, and other jobs that remove left-over ones."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint_drafts import Draft

from moec.runtime.checkpoint.folders import remove_old
from moec.runtime.checkpoint.format import temporary
from moec.runtime.checkpoint.format.temporary import MARK, Temporary


def is_locked(path: str | Path) -> bool:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def test_a_left_over_folder_is_locked_until_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job that waits for the lock gets a folder that goes away."""
    left_over, removed, rmtree = tmp_path / f".4{MARK}x", list[tuple[Path, bool]](), shutil.rmtree

    def note(path: str | Path, **options: Any) -> None:
        removed.append((Path(path), is_locked(path)))
        rmtree(path, **options)

    monkeypatch.setattr(temporary.shutil, "rmtree", note)
    newest = Draft(tmp_path / "100").write()
    left_over.mkdir()
    remove_old(newest, 1)
    assert removed == [(left_over, True)]
    assert os.listdir(tmp_path) == ["100"]


def test_a_folder_that_another_job_removes_before_it_is_open_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, made = os.mkdir, list[Path]()

    def make(path: Path, *mode: int) -> None:
        mkdir(path, *mode)  # fails for the parent, which is there
        made.append(Path(path))
        if len(made) == 1:
            os.rmdir(path)

    monkeypatch.setattr(temporary.os, "mkdir", make)
    folder = Temporary(tmp_path / "100")
    assert os.listdir(tmp_path) == [folder.path.name]
    assert folder.path == made[1] != made[0]
    assert is_locked(folder.path)
    folder.discard()


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o700), (0o002, 0o775), (0o022, 0o755)])
def test_a_checkpoint_has_the_mode_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        Temporary(tmp_path / "100").publish()
    finally:
        os.umask(before)
    assert (tmp_path / "100").stat().st_mode & 0o777 == mode

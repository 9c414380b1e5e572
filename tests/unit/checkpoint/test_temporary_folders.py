"""Temporary folders of checkpoints, and other jobs that remove left-over ones."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_draft import Draft

from moec.runtime.checkpoint import folders
from moec.runtime.checkpoint.folders import MARK, Temporary, remove_old


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

    monkeypatch.setattr(folders.shutil, "rmtree", note)
    newest = Draft(tmp_path / "100").write()
    left_over.mkdir()
    remove_old(newest, 1)
    assert removed == [(left_over, True)]
    assert os.listdir(tmp_path) == ["100"]


def test_a_folder_that_another_job_removes_before_it_is_open_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdtemp, made = folders.tempfile.mkdtemp, list[str]()

    def make(**options: Any) -> str:
        made.append(mkdtemp(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(folders.tempfile, "mkdtemp", make)
    temporary = Temporary(tmp_path / "100")
    assert os.listdir(tmp_path) == [temporary.path.name]
    assert str(temporary.path) == made[1]
    assert is_locked(temporary.path)
    temporary.discard()

"""Temporary folders: of a checkpoint that is being written, and of saves that were killed. Needs no torch.

A temporary folder lies beside the checkpoint's name and is locked. One whose lock is free is left over.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from moec.runtime.checkpoint.format.files import exists, no_name, refuse_existing, sync_name, unwritable

MARK = ".moec-save-"
"""A part of the name of every temporary folder."""
STALE_SECONDS = 24 * 3600.0
"""The age from which a temporary folder counts as left over on a file system without locks."""


class Temporary:
    """A new, locked folder beside `target`. `publish` gives it `target`'s name, `discard` removes it.

    Raises `JobError` MOE0803 if `target` exists, MOE0804 if it cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        refuse_existing(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            while not self._make():
                pass  # another job took the folder for a left-over one before it was locked
        except OSError as error:
            raise unwritable(target, error) from error
        except ValueError as error:  # a NUL, or half of a character
            raise no_name(target, "MOE0804") from error

    def _make(self) -> bool:
        """Makes and locks a folder; returns whether it still exists. Unlike `tempfile` it respects the umask."""
        self.path = self.target.with_name(f".{self.target.name}{MARK}{secrets.token_hex(8)}")
        self.path.mkdir()
        try:
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        if self.path.exists():
            return True
        os.close(self._lock)
        return False

    def publish(self) -> None:
        """Syncs the folder, renames it, and syncs its parent. Of several jobs that do so one succeeds.

        Raises `JobError` MOE0803 and MOE0804.
        """
        try:
            os.fsync(self._lock)
            os.rename(self.path, self.target)
        except OSError as error:
            # A folder is not renamed onto one with files in it.
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise exists(self.target) from error
            raise unwritable(self.target, error) from error
        os.close(self._lock)
        self._lock = -1
        sync_name(self.target)

    def discard(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep_left_over(target: Path) -> None:
    """Removes the temporary folders that killed saves to `target` have left."""
    for path in target.parent.glob(f".{glob.escape(target.name)}{MARK}*"):
        remove_left_over(path)


def remove_left_over(path: Path) -> None:
    """Removes a temporary folder unless a job has its lock. A job that waits for the lock then finds no folder."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        if _is_left_over(file):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(file)


def _is_left_over(file: int) -> bool:
    """Locks an open folder, if it can; returns whether no job writes to it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(file).st_mtime > STALE_SECONDS
    return True

"""Folders of checkpoints: temporary ones, the last complete one, old ones. Needs no torch.

A checkpoint is written to a temporary folder beside it, which is locked, and renamed. A temporary folder whose lock is
free is left over from a run that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moec.runtime.checkpoint.index import INDEX, Head, shard_name
from moec.runtime.checkpoint.reading import read_head
from moec.runtime.errors import JobError

MARK = ".moec-save-"
STALE_SECONDS = 24 * 3600.0
"""The age from which a temporary folder counts as left over on a file system without locks."""


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in `folder` with the highest step, or None. Needs no torch.

    A checkpoint is complete if its shards have the sizes that `checkpoint.json` states; digests are not compared.
    Anything else in the folder is ignored, temporary folders of killed runs among it.
    """
    found = sorted(checkpoints_in(Path(folder)), key=lambda item: (item[1].step, item[0].name), reverse=True)
    return next((path for path, head in found if _is_complete(path, head)), None)


def checkpoints_in(folder: Path) -> Iterator[tuple[Path, Head]]:
    """The folders in `folder` that have a valid `checkpoint.json`."""
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        paths = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in map(Path, paths):
        with suppress(JobError):
            yield path, read_head(path)


def _is_complete(path: Path, head: Head) -> bool:
    try:
        sizes = [os.stat(path / shard_name(rank)).st_size for rank in range(head.world_size)]
        return tuple(sizes) == head.shard_bytes and (path / INDEX).is_file()
    except OSError:
        return False


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

    def _make(self) -> bool:
        """Makes and locks a folder; returns whether it is there."""
        self.path = Path(tempfile.mkdtemp(prefix=f".{self.target.name}{MARK}", dir=self.target.parent))
        self.path.chmod(0o755)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        if self.path.exists():
            return True
        os.close(self._lock)
        return False

    def publish(self) -> None:
        """Syncs the folder, renames it, and syncs its parent. Of several jobs that do so one succeeds."""
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
        sync_folder(self.target.parent)

    def discard(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def refuse_existing(target: Path) -> None:
    """Raises `JobError` MOE0803 if there is something at `target`: no checkpoint is overwritten."""
    if os.path.lexists(target):
        raise exists(target)


def shown(path: Path) -> str:
    """`path` as a script would write it: relative to the working folder if it is inside."""
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if inside else path)


def exists(target: Path) -> JobError:
    """The error for a checkpoint whose name is in use."""
    return JobError("MOE0803", f"{shown(target)}: exists", "save under another name, or remove it first")


def unwritable(path: Path, error: OSError, who: str = "") -> JobError:
    """The error for a checkpoint that cannot be written."""
    return JobError(
        "MOE0804",
        f"{who}{shown(path)}: {error.strerror}",
        "free space, or save to a folder with write permission",
    )


def sync_folder(path: Path) -> None:
    """Makes new names in a folder durable."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_file(path: Path, content: bytes) -> None:
    """Writes and syncs a new file."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def remove_old(newest: Path, keep: int) -> None:
    """Leaves the `keep` checkpoints with the highest steps beside `newest`, of its model; removes left-over folders.

    `newest` itself stays. Raises `JobError` MOE0804.
    """
    folder, model = newest.parent, read_head(newest).model
    for entry in list(os.scandir(folder)):
        if entry.name.startswith(".") and MARK in entry.name and _is_left_over(Path(entry.path)):
            shutil.rmtree(entry.path, ignore_errors=True)
    found = [item for item in checkpoints_in(folder) if item[1].model == model and item[0] != newest]
    complete = sorted(((head.step, path) for path, head in found if _is_complete(path, head)), reverse=True)
    for _, path in complete[max(0, keep - 1) :]:
        try:
            shutil.rmtree(_hidden(path, "old"))  # renamed first: a folder that is half removed must not be found
        except OSError as error:
            raise JobError(
                "MOE0804",
                f"{shown(newest)} is written, but {shown(path)} cannot be removed: {error.strerror}",
                "remove it yourself, or save without `keep`",
            ) from error


def set_aside_incomplete(target: Path) -> None:
    """Hides a checkpoint at `target` that lacks a part, so that a resumed run can save there again."""
    with suppress(JobError, OSError):
        if target.is_dir() and not target.is_symlink() and not _is_complete(target, read_head(target)):
            _hidden(target, "incomplete")


def _hidden(path: Path, why: str) -> Path:
    """`path` under a name that the next save with `keep` removes."""
    return path.rename(path.parent / f".{path.name}{MARK}{why}-{time.time_ns()}")


def _is_left_over(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(file).st_mtime > STALE_SECONDS
    finally:
        os.close(file)
    return True

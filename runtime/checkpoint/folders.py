"""Folders of checkpoints: temporary ones, the last complete one, old ones. Needs no torch.

A checkpoint is written to a temporary folder beside it, which is locked, and renamed. A temporary folder whose lock is
free is left over from a run that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moec.runtime.checkpoint.index import HEAD, INDEX, Head, damaged, missing, shard_name
from moec.runtime.checkpoint.reading import read_head
from moec.runtime.errors import JobError

MARK = ".moec-save-"
DAMAGED = ".damaged"
"""The end of the name under which `set_aside` keeps a damaged checkpoint."""
SET_ASIDE = re.compile(re.escape(DAMAGED) + r"(-[0-9]+)?\Z")
STALE_SECONDS = 24 * 3600.0
"""The age from which a temporary folder counts as left over on a file system without locks."""


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in `folder` with the highest step, or None. Needs no torch.

    A checkpoint is complete if its shards have the sizes that `checkpoint.json` states; digests are not compared.
    Anything else in the folder is ignored, temporary folders of killed runs among it.
    """
    return next((path for path, head in heads_in(Path(folder)) if fault_of(path, head) is None), None)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the highest step first, those with damages or of another format among them.

    A checkpoint without a valid `checkpoint.json` has the step that is its name; other names are ignored.
    """
    return [path for path, _ in heads_in(folder)]


def heads_in(folder: Path) -> list[tuple[Path, Head | None]]:
    """`newest_first`, each with its head, or None if that is not valid."""
    found = list[tuple[int, Path, Head | None]]()
    for path in _folders_in(folder):
        try:
            head = read_head(path)
            found.append((head.step, path, head))
        except JobError:
            if re.fullmatch(r"[0-9]{1,18}", path.name) and any(
                os.path.lexists(path / name) for name in (HEAD, INDEX, shard_name(0))
            ):
                found.append((int(path.name), path, None))
    return [(path, head) for _, path, head in sorted(found, key=lambda each: each[:2], reverse=True)]


def fault_of(path: Path, head: Head | None = None) -> JobError | None:
    """Why the checkpoint at `path` is not complete: MOE0801, MOE0802, or MOE0800 for a file that cannot be read.

    `head`: its head if it has been read. Compares names and sizes of files, but no digests of tensors.
    """
    file = path / HEAD
    try:
        if head is None:
            if not os.path.lexists(file):
                return damaged(file, "it is missing")
            head = read_head(path)
        for rank, stated in enumerate(head.shard_bytes):
            file = path / shard_name(rank)
            size = os.stat(file).st_size
            if size != stated:
                return damaged(file, f"it has {size} bytes, but {stated} were written")
        file = path / INDEX
        os.stat(file)
    except JobError as error:
        return error
    except FileNotFoundError:
        return damaged(file, "it is missing")
    except OSError as error:
        return missing(file, error)
    return None


def checkpoints_in(folder: Path) -> Iterator[tuple[Path, Head]]:
    """The folders in `folder` that have a valid `checkpoint.json`."""
    for path in _folders_in(folder):
        with suppress(JobError):
            yield path, read_head(path)


def _folders_in(folder: Path) -> list[Path]:
    """Folders that may be checkpoints: none that are hidden, links, or set aside. Without `folder` none.

    Raises `JobError` MOE0800 if `folder` is a file or cannot be read: there may be checkpoints.
    """
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        message = f"{shown(folder)}: {error.strerror}"
        raise JobError("MOE0800", message, "give the folder that has the checkpoints") from error
    return [folder / name for name in names if not SET_ASIDE.search(name)]


def require_parent(folder: Path) -> None:
    """Raises `JobError` MOE0800 for a checkpoint in place of the folder that has it."""
    if os.path.lexists(folder / HEAD):
        raise JobError(
            "MOE0800",
            f"{shown(folder)} is a checkpoint itself: job.resume looks for checkpoints inside of it",
            f"use `job.resume({str(folder.parent)!r}, …)`, or `job.load({str(folder)!r}, …)` for this one",
        )


def left_out(folder: Path) -> list[str]:
    """Names in `folder` that have a `checkpoint.json` and that `newest_first` does not give: links, for one."""
    if not folder.is_dir():
        return []
    taken = {path.name for path in newest_first(folder)}
    visible = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(name for name in visible if name not in taken and os.path.lexists(folder / name / HEAD))


def set_aside(path: Path) -> Path | None:
    """Renames a damaged checkpoint to a new name beside it; returns the name, or None where it cannot be renamed."""
    for number in range(1, 100):
        target = path.with_name(f"{path.name}{DAMAGED}" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(target):
            with suppress(OSError):
                return path.rename(target)
            return None
    return None


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
        try:
            self.path.chmod(0o755)
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


def unwritable(path: Path, error: OSError, rank: str = "") -> JobError:
    """The error for a checkpoint that cannot be written. `rank`: a prefix that names the rank."""
    return JobError(
        "MOE0804",
        f"{rank}{shown(path)}: {error.strerror}",
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
    """Leaves `keep` complete checkpoints of its model: `newest`, and those with the highest steps.

    Removes left-over folders. Raises `JobError` MOE0804.
    """
    folder, model = newest.parent, read_head(newest).model
    for entry in list(os.scandir(folder)):
        if entry.name.startswith(".") and MARK in entry.name:
            _remove_left_over(Path(entry.path))
    found = [item for item in checkpoints_in(folder) if item[1].model == model and item[0] != newest]
    complete = sorted(((head.step, path) for path, head in found if fault_of(path, head) is None), reverse=True)
    for _, path in complete[max(0, keep - 1) :]:
        try:
            # Renamed first: a folder that is half removed must not be found.
            shutil.rmtree(path.rename(path.parent / f".{path.name}{MARK}old-{time.time_ns()}"))
        except OSError as error:
            raise JobError(
                "MOE0804",
                f"{shown(newest)} is written, but {shown(path)} cannot be removed: {error.strerror}",
                "remove it yourself, or save without `keep`",
            ) from error


def _remove_left_over(path: Path) -> None:
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

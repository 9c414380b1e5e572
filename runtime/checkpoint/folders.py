"""Folders of checkpoints: finds the last complete one, sets damaged ones aside, removes old ones. Needs no torch."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from moec.runtime.calls import called
from moec.runtime.checkpoint.format.faults import damaged, missing
from moec.runtime.checkpoint.format.files import shown
from moec.runtime.checkpoint.format.index import HEAD, INDEX, Head, shard_name
from moec.runtime.checkpoint.format.reading import read_head
from moec.runtime.checkpoint.format.temporary import MARK, remove_left_over
from moec.runtime.checkpoint.options import require_path
from moec.runtime.checkpoint.runs import ListedCheckpoint, checkpoints_of_last_run, newest_first
from moec.runtime.errors import JobError

NUMBER = "[0-9]{1,18}"
"""The pattern of names that are a step."""
ASIDE = ".damaged"
"""The end of the name under which `set_aside` keeps a damaged checkpoint."""
SET_ASIDE = re.compile(re.escape(ASIDE) + r"(-[0-9]+)?\Z")


@called("moec.latest", folder="the folder that `job.checkpoint` saves to, such as 'checkpoints'")
def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The last complete checkpoint of the run that has saved last in `folder`, or None. Needs no torch.

    A checkpoint is complete if its shards have the sizes that `checkpoint.json` states; digests are not compared.
    Anything else in the folder is ignored, temporary folders of killed runs among it.
    """
    require_path("moec.latest", "folder", folder)
    checkpoints = checkpoints_of_last_run(heads_in(Path(folder)))
    return next((path for path, head in checkpoints if fault_of(path, head) is None), None)


def heads_in(folder: Path) -> list[ListedCheckpoint]:
    """The checkpoints in `folder`, the last saved first; damaged ones and those of another format are included.

    The step of a checkpoint without a valid `checkpoint.json` is its name; it is ignored if its name is no number.
    """
    checkpoints = list[ListedCheckpoint]()
    for path in _folders_in(folder):
        try:
            checkpoints.append((path, read_head(path)))
        except JobError:
            if re.fullmatch(NUMBER, path.name) and any(
                os.path.lexists(path / name) for name in (HEAD, INDEX, shard_name(0))
            ):
                checkpoints.append((path, None))
    return newest_first(checkpoints)


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


def _folders_in(folder: Path) -> list[Path]:
    """Folders that may be checkpoints, without hidden ones, links and those set aside; none if `folder` is missing.

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
    """Raises `JobError` MOE0800 for a checkpoint where the folder that contains it is expected."""
    if os.path.lexists(folder / HEAD):
        raise JobError(
            "MOE0800",
            f"{shown(folder)} is a checkpoint itself: job.resume looks for checkpoints inside of it",
            f"use `job.resume({str(folder.parent)!r}, …)`, or `job.load({str(folder)!r}, …)` for this one",
        )


def unlisted(folder: Path) -> list[str]:
    """Names in `folder` that have a `checkpoint.json` but that `heads_in` does not give, such as links."""
    if not folder.is_dir():
        return []
    taken = {path.name for path, _ in heads_in(folder)}
    visible = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(name for name in visible if name not in taken and os.path.lexists(folder / name / HEAD))


def set_aside(path: Path) -> Path | None:
    """Renames a damaged checkpoint to a new name beside it; returns the name, or None where it cannot be renamed."""
    for number in range(1, 100):
        target = path.with_name(f"{path.name}{ASIDE}" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(target):
            with suppress(OSError):
                return path.rename(target)
            return None
    return None


def remove_old(newest: Path, keep: int) -> str:
    """Keeps `newest` and the last `keep` - 1 complete checkpoints before it, of the same run and series.

    A series is names that differ in their last number alone: `step-6` and `step-20`, not `best`. Removes temporary
    folders of killed saves too. Returns what could not be removed, in words; empty if all was.
    """
    folder, left = newest.parent, list[str]()
    try:
        names, run, checkpoints = os.listdir(folder), read_head(newest).run, heads_in(folder)
    except OSError as error:
        return f"{shown(folder)}: {error.strerror}"
    except JobError as error:
        return error.diagnostics[0].message
    for name in names:
        if name.startswith(".") and MARK in name:
            remove_left_over(folder / name)
    complete = [
        path
        for path, head in checkpoints
        if head is not None and head.run == run and path != newest
        and _series(path.name) == _series(newest.name) and fault_of(path, head) is None
    ]  # fmt: skip
    for path in complete[keep - 1 :]:
        try:
            _remove(path)
        except OSError as error:
            left.append(f"{shown(path)}: {error.strerror}")
    return "; ".join(left)


def _remove(path: Path) -> None:
    """Removes a checkpoint. If that fails, it keeps its name; if a part is removed already, its name stays hidden."""
    files, hidden = os.listdir(path), path.parent / f".{path.name}{MARK}old-{time.time_ns()}"
    path.rename(hidden)
    try:
        shutil.rmtree(hidden)
    except OSError:
        if len(os.listdir(hidden)) == len(files):
            hidden.rename(path)
        raise


def _series(name: str) -> tuple[str, ...]:
    """A name without its last number: what is before and after it."""
    return tuple(re.split(r"[0-9]+(?=[^0-9]*\Z)", name))

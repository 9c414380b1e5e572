"""What a folder of checkpoints has: the last complete one, damaged ones, old ones that are removed. Needs no torch."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from moec.runtime.calls import called
from moec.runtime.checkpoint.files import shown, written_but
from moec.runtime.checkpoint.index import HEAD, INDEX, Head, damaged, missing, shard_name
from moec.runtime.checkpoint.options import require_path
from moec.runtime.checkpoint.reading import read_head
from moec.runtime.checkpoint.temporary import MARK, remove_left_over
from moec.runtime.errors import JobError

ASIDE = ".damaged"
"""The end of the name under which `set_aside` keeps a damaged checkpoint."""
SET_ASIDE = re.compile(re.escape(ASIDE) + r"(-[0-9]+)?\Z")


@called("moec.latest", folder="the folder that `job.checkpoint` saves to, such as 'checkpoints'")
def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in `folder` with the highest step, or None. Needs no torch.

    A checkpoint is complete if its shards have the sizes that `checkpoint.json` states; digests are not compared.
    Anything else in the folder is ignored, temporary folders of killed runs among it.
    """
    require_path("moec.latest", "folder", folder)
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


def unlisted(folder: Path) -> list[str]:
    """Names in `folder` that have a `checkpoint.json` and that `newest_first` does not give: links, for one."""
    if not folder.is_dir():
        return []
    taken = {path.name for path in newest_first(folder)}
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


def remove_old(newest: Path, keep: int) -> None:
    """Leaves `keep` complete checkpoints of its series: `newest`, and those with the highest steps.

    Of a series are those of its model whose names equal its own but for the last number: `step-6` and `step-20`, not
    `best`. Removes left-over folders. Raises `JobError` MOE0804, which says that `newest` is written.
    """
    folder = newest.parent
    try:
        names, model, found = os.listdir(folder), read_head(newest).model, heads_in(folder)
    except OSError as error:
        raise _not_removed(newest, f"old checkpoints cannot be removed: {shown(folder)}: {error.strerror}") from error
    except JobError as error:
        raise _not_removed(newest, f"old checkpoints cannot be removed: {error.diagnostics[0].message}") from error
    for name in names:
        if name.startswith(".") and MARK in name:
            remove_left_over(folder / name)
    series = _series(newest.name)
    complete = [
        path
        for path, head in found
        if head is not None and head.model == model and path != newest
        and _series(path.name) == series and fault_of(path, head) is None
    ]  # fmt: skip
    for path in complete[keep - 1 :]:
        try:
            # Renamed first: a folder that is half removed must not be found.
            shutil.rmtree(path.rename(path.parent / f".{path.name}{MARK}old-{time.time_ns()}"))
        except OSError as error:
            raise _not_removed(newest, f"{shown(path)} cannot be removed: {error.strerror}") from error


def _series(name: str) -> tuple[str, ...]:
    """A name without its last number: what is before and after it."""
    return tuple(re.split(r"[0-9]+(?=[^0-9]*\Z)", name))


def _not_removed(newest: Path, words: str) -> JobError:
    return written_but(newest, words, "remove old checkpoints yourself, or save without `keep`")

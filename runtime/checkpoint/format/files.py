"""Writes the files of checkpoints durably, and refuses names that exist or cannot be written. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from moec.runtime.errors import JobError
from moec.runtime.script import shown_path


def refuse_existing(target: Path, also: str = "") -> None:
    """Raises `JobError` MOE0803 if there is something at `target`: no checkpoint is overwritten.

    `also`: one more way out.
    """
    if os.path.lexists(target):
        raise exists(target, also)


def shown(path: Path) -> str:
    """`path` as a script would write it: relative to the working folder if it is inside."""
    return shown_path(str(path))


def exists(target: Path, also: str = "") -> JobError:
    """The error for a checkpoint whose name is in use. `also`: one more way out."""
    ways = filter(None, ("save under another name, or remove it first", also))
    return JobError("MOE0803", f"{shown(target)}: exists", "; ".join(ways))


def unwritable(path: Path, error: OSError, rank: str = "") -> JobError:
    """The error for a checkpoint that cannot be written. `rank`: a prefix that names the rank."""
    return JobError(
        "MOE0804",
        f"{rank}{shown(path)}: {error.strerror}",
        "free space, or save to a folder with write permission",
    )


def no_name(path: Path, code: str) -> JobError:
    """The error for a name that no file can have."""
    return JobError(code, f"{str(path)!r} is no name of a file", "give another name")


def sync(path: Path) -> None:
    """Makes the content of a file durable, or new names in a folder."""
    file = os.open(path, os.O_RDONLY)
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


def give_name(fresh: Path, target: Path) -> None:
    """Gives the file `fresh` the name `target`; the name `fresh` may remain. Raises `OSError`.

    Raises `JobError` MOE0803 if `target` exists, and on a file system with hard links even if it is made meanwhile.
    """
    try:
        os.link(fresh, target)
    except FileExistsError as error:
        raise exists(target) from error
    except OSError:  # a file system without hard links
        refuse_existing(target)
        fresh.rename(target)


def sync_name(target: Path) -> None:
    """Makes the name of a file or folder durable. Raises `JobError` MOE0804, which says that it is written."""
    try:
        sync(target.parent)
    except OSError as error:
        raise written_but(
            target,
            f"its name may be lost in a power cut: {shown(target.parent)} cannot be synced: {error.strerror}",
            "the checkpoint can be loaded now; check the disk before you rely on it",
        ) from error


def written_but(target: Path, words: str, help: str) -> JobError:
    """The error for a checkpoint that is complete under its name, while something after that has failed."""
    return JobError("MOE0804", f"{shown(target)} is written, but {words}", help)

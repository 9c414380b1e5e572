"""The errors of folders that are no checkpoints, and of files that differ from what moec wrote. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from moec.grammar.folder_kinds import CHECKPOINT, in_words, kind_of
from moec.runtime.errors import JobError

TORCH_METADATA = ".metadata"
"""The file that `torch.distributed.checkpoint` writes."""


def damaged(path: Path, message: str) -> JobError:
    """The error for a file that differs from what moec wrote."""
    return JobError("MOE0801", f"{path}: {message}", "load an earlier checkpoint; `moec checkpoint verify` checks one")


def missing(path: Path, error: OSError) -> JobError:
    """The error for a file that cannot be read. Its help names the checkpoints that the folder has, if any.

    If the folder of a missing `checkpoint.json` is something else (a file, a plan, torch's), the error says what.
    """
    if path.name == CHECKPOINT and path.parent.is_file():
        return JobError(
            "MOE0800",
            f"{path.parent} is a file, and a checkpoint is a folder",
            "give the folder that has `checkpoint.json`; `moec checkpoint convert FILE -o FOLDER --plan PLAN` makes "
            "one from a safetensors file",
        )
    if path.name == CHECKPOINT and is_torch_folder(path.parent):
        return torch_folder(path.parent)
    folder = path.parent
    if (kind := kind_of(folder)) is not None and kind != "checkpoint":
        return JobError("MOE0800", f"{folder} is {in_words(kind)}", "give the folder of a checkpoint")
    if inside := _checkpoints_in(folder):
        help = f"this folder has the checkpoints {inside}: give one of them"
    elif not folder.exists() and (beside := _checkpoints_in(folder.parent)):
        help = f"{folder.parent} has the checkpoints {beside}"
    else:
        help = "`moec.latest(folder)` finds the last complete checkpoint of a folder"
    return JobError("MOE0800", f"{path}: {error.strerror}", help)


def _checkpoints_in(folder: Path) -> str:
    """The names of the first checkpoints in `folder`."""
    names = sorted(head.parent.name for head in folder.glob(f"*/{CHECKPOINT}"))
    return ", ".join([*names[:5], *(["…"] if len(names) > 5 else [])])


def is_torch_folder(folder: Path) -> bool:
    """Whether `folder` is one that `torch.distributed.checkpoint` wrote."""
    return os.path.lexists(folder / TORCH_METADATA) and not os.path.lexists(folder / CHECKPOINT)


def torch_folder(folder: Path) -> JobError:
    """The error for a folder of `torch.distributed.checkpoint` where a checkpoint is expected."""
    return JobError(
        "MOE0800",
        f"{folder} is a folder of torch.distributed.checkpoint, which moec does not read: its metadata is a pickle",
        "read it into `state = model.state_dict()` with `torch.distributed.checkpoint.load`, and give that to "
        "`model.load_state_dict`; then `job.save` writes a checkpoint",
    )


def unexpected(error: Exception, prefix: str = "") -> JobError:
    """The error for a failure that neither the disk nor the user caused. `prefix` begins its message."""
    is_memory = isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)
    return JobError(
        "MOE0812",
        f"{prefix}{type(error).__name__}: {str(error)[:300] or 'no message'}",
        "free memory on this rank, or save less on it" if is_memory else "report this if it is an error of moec",
    )

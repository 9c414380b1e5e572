"""The script that has called moec: its line that runs now, and warnings at that line. Needs no torch."""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from pathlib import Path
from types import FrameType


def script_line() -> str:
    """The line of the script that runs now, as `train.py:13`; empty where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_frame(frame):
        frame = frame.f_back
    return "" if frame is None else f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def warn(message: str) -> None:
    """Warns at the line of the script that runs now; where there is none, at the outermost line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_library_frame(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_first(message: str, rank: str = "RANK", *, stage_size: int = 0) -> None:
    """`warn` if the variable `rank` is 0: `RANK` for warnings about the model, `LOCAL_RANK` for those about a machine.

    Other ranks would warn of the same. Without torchrun every process warns. With `stage_size`, the ranks of a pipeline
    stage, the first rank of each stage warns: other stages may not see the same.
    """
    number = int(os.environ.get(rank, "0"))
    if number == 0 or (stage_size and number % stage_size == 0):
        warn(message)


def is_library_frame(frame: FrameType) -> bool:
    """Whether the frame is moec's, Python's or an installed package's."""
    module, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    return module.partition(".")[0] == "moec" or path.startswith((*_libraries(), "<frozen"))


def shown_path(path: str) -> str:
    """`path`, relative to the working folder if it is inside."""
    try:
        return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
    except OSError:  # the working folder is gone
        return path


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of Python and of installed packages."""
    import sysconfig

    return tuple(str(Path(sysconfig.get_path(name))) + os.sep for name in ("stdlib", "purelib", "platlib"))

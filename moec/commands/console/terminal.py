"""Colours, widths and signs of success, for stdout and stderr separately."""

from __future__ import annotations

import os
import sys
from typing import TextIO

GREEN, RED, DIM, RESET = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
PIPE_WIDTH = 100
"""Columns where there is no terminal."""
NARROWEST = 20


def colored(stream: TextIO) -> bool:
    """Whether to colour what is written to `stream`.

    `NO_COLOR`, if not empty, says no (no-color.org); `FORCE_COLOR`, if neither empty nor 0, says yes
    (force-color.org); otherwise a terminal that is not `TERM=dumb` says yes. `NO_COLOR` wins over `FORCE_COLOR`.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns(stream: TextIO) -> int:
    """The width of `stream`'s terminal: `COLUMNS` where it is set, `PIPE_WIDTH` where there is no terminal."""
    return known_columns(stream) or PIPE_WIDTH


def known_columns(stream: TextIO) -> int | None:
    """`columns`, but None where there is no terminal and `COLUMNS` is not set: lines may be as long as they are."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated):
        return max(NARROWEST, int(stated))
    try:
        return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):  # no terminal; a stream without a file
        return None


def success(text: str, stream: TextIO | None = None) -> str:
    """`✓ text`, the sign green where `stream` (default: stdout) has colours."""
    return _marked("✓", GREEN, text, stream)


def failure(text: str, stream: TextIO | None = None) -> str:
    """`✗ text`, the sign red where `stream` (default: stdout) has colours."""
    return _marked("✗", RED, text, stream)


def _marked(sign: str, color: str, text: str, stream: TextIO | None) -> str:
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        sign.encode(encoding)
    except UnicodeEncodeError:
        sign = {"✓": "ok:", "✗": "failed:"}[sign]
    return f"{color}{sign}{RESET} {text}" if colored(stream) else f"{sign} {text}"

"""Replaces the text of a user's file atomically, and only if the file still has the text that was read."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from moec.grammar.diagnostics import DiagnosticError, diagnose

MARK = "\ufeff"
"""The byte order mark, with which some editors begin a UTF-8 file."""


def replace_file(file: Path, before: str, after: str) -> None:
    """Writes `after` to `file`, whose text, without a mark of its encoding, was `before`. A link stays a link.

    Raises `DiagnosticError` MOE0014, and leaves the file as it is, if it is no regular file, may not be written, has
    changed meanwhile, or cannot be written.
    """
    try:
        target = file.resolve(strict=True)
        status = target.stat()
        if not stat.S_ISREG(status.st_mode):
            raise not_written(file, "this is no regular file")
        if not status.st_mode & 0o222 or not os.access(target, os.W_OK):
            raise not_written(file, "the file is read-only", help=f"`chmod u+w {file}` allows to write it")
        if target.read_bytes().decode("utf-8-sig", "replace") != before.removeprefix(MARK):
            raise not_written(file, "the file has changed since it was read", help="run the command again")
        if status.st_nlink > 1:  # a new file would leave the other names with the old text
            target.write_bytes(after.encode())
        else:
            write_whole(target, after.encode(), status.st_mode)
    except OSError as error:
        raise not_written(file, error.strerror or str(error)) from error


def write_whole(target: Path, data: bytes, mode: int | None = None) -> None:
    """Writes `data` to `target`, new or not, atomically. `mode`: its permissions; None: the usual. Raises `OSError`."""
    descriptor, fresh = tempfile.mkstemp(prefix=".moec-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.chmod(fresh, 0o644 if mode is None else stat.S_IMODE(mode))
        os.replace(fresh, target)
    except BaseException:
        os.unlink(fresh)
        raise


def not_written(file: Path, reason: str | None, help: str = "") -> DiagnosticError:
    """MOE0014: `file` cannot be written for `reason`."""
    return DiagnosticError([diagnose("MOE0014", None, f"{file}: {reason}", help=help)])

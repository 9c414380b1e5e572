"""`moec --version`: the version of moec and of what it runs on, as installed. Imports none of it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from moec import __version__
from moec.commands.documents import VersionDocument
from moec.commands.output import emit


def run(style: str) -> None:
    """Prints the versions."""
    found = VersionDocument(
        moec=__version__, python=platform.python_version(), torch=_installed("torch"), triton=_installed("triton")
    )
    emit(style, lambda: [_line(found)], lambda: found)


def _line(found: VersionDocument) -> str:
    """`moec 0.1.0 (Python 3.11.7, torch 2.13.0, no triton)`."""
    parts = [
        f"{name} {known}" if known else f"no {name}"
        for name, known in zip(("Python", "torch", "triton"), (found.python, found.torch, found.triton), strict=True)
    ]
    return f"moec {found.moec} ({', '.join(parts)})"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

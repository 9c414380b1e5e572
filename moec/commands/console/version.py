"""`moec --version`: the installed versions of moec, Python, torch and triton. Imports none of these packages."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from moec import __version__
from moec.commands.console.documents import VersionDocument
from moec.commands.console.output import emit

TESTED = {"Python": ((3, 11), (3, 14)), "torch": ((2, 11), (2, 13)), "triton": ((3, 6), (3, 9))}
"""The oldest and newest versions that moec is tested with; the oldest is also required."""
BACKENDS = {"torch": "torch", "triton": "triton", "quack": "quack-kernels"}
"""The packages of the backends, all of which need torch too."""


def run(style: str) -> None:
    """Prints the versions."""
    document = versions()
    emit(style, lambda: [version_line(document)], lambda: document)


def versions() -> VersionDocument:
    """The versions of moec, Python, torch and triton, and the backends that are installed."""
    torch = installed("torch")
    return VersionDocument(
        moec=__version__,
        python=platform.python_version(),
        torch=torch,
        triton=installed("triton"),
        backends=[name for name, package in BACKENDS.items() if torch and installed(package)],
    )


def version_line(document: VersionDocument) -> str:
    """`moec 0.1.0 (Python 3.11.7, torch 2.13.0, no triton; backends: torch)`."""
    parts = [
        f"{name} {known}" if known else f"no {name}"
        for name, known in zip(
            ("Python", "torch", "triton"), (document.python, document.torch, document.triton), strict=True
        )
    ]
    return f"moec {document.moec} ({', '.join(parts)}; backends: {', '.join(document.backends) or 'none'})"


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parsed(text: str) -> tuple[int, int]:
    """The first two numbers of a version, such as 2 and 13 of `2.13.0+cpu`."""
    numbers = [int(digits) for digits in re.findall(r"^\d+|(?<=\.)\d+", text)]
    major, minor, *_ = [*numbers, 0, 0]
    return major, minor

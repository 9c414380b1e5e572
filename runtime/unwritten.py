"""The warning about an output that could not be written."""

from __future__ import annotations

import sys

from moec.grammar.diagnostics import diagnose, render
from moec.grammar.diagnostics.diagnostic import Severity


def warn_unwritten(error: Exception) -> None:
    """Prints a warning about an output that could not be written; training goes on."""
    warning = diagnose(
        "MOE0718",
        None,
        f"{type(error).__name__}: {error}",
        help="training goes on without it",
        severity=Severity.WARNING,
    )
    print(render([warning], "full").rstrip("\n"), file=sys.stderr, flush=True)

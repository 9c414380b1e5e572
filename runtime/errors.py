"""A user's mistakes at run time: the same on every rank, said once."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from moec.grammar.diagnostics import DiagnosticError, diagnose, render

HEAD_START_SECONDS = 2.0


class JobError(DiagnosticError):
    """Something a training script or its launch got wrong, found before any collective that trains has begun."""

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__([diagnose(code, None, message, help=help)])


def speak_once(rank: int) -> None:
    """From here on an uncaught `DiagnosticError` is printed by rank 0 alone, as a diagnostic and not as a traceback."""
    inner = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DiagnosticError):
            inner(kind, error, trace)
        elif rank == 0:
            print(render(error.diagnostics, "full").rstrip("\n"), file=sys.stderr, flush=True)
        else:
            # The first rank to exit has the launcher kill the others: rank 0 must have spoken by then.
            time.sleep(HEAD_START_SECONDS)

    sys.excepthook = hook

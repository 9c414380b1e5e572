"""Errors of users at run time: raised on every rank, printed once."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from moec.grammar.diagnostics import DiagnosticError, diagnose, render

HEAD_START_SECONDS = 2.0


class JobError(DiagnosticError):
    """An error in a training script, its launch or its numbers, raised on every rank and before any gradient."""

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__([diagnose(code, None, message, help=help)])


class RankError(JobError):
    """Another rank has died or stalled, and this one was told or found out. One rank has printed it already."""

    def __init__(self, text: str) -> None:
        super().__init__("MOE0705", text)


def speak_once(rank: int) -> None:
    """From here on an uncaught `DiagnosticError` is printed by rank 0 alone, as a diagnostic and not as a traceback."""
    inner = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DiagnosticError):
            inner(kind, error, trace)
        elif isinstance(error, RankError):
            pass
        elif rank == 0:
            print(render(error.diagnostics, "full").rstrip("\n"), file=sys.stderr, flush=True)
        else:
            # The first rank to exit has the launcher kill the others: rank 0 must have spoken by then.
            time.sleep(HEAD_START_SECONDS)

    sys.excepthook = hook

"""Errors at run time, raised on every rank and printed once."""

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
    """Another rank has died or stalled. One rank has printed the error already."""

    def __init__(self, text: str) -> None:
        super().__init__("MOE0705", text)


def speak_once(rank: int) -> None:
    """Installs a hook by which rank 0 alone prints an uncaught `DiagnosticError`, as a diagnostic without traceback."""
    inner = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DiagnosticError):
            inner(kind, error, trace)
        elif isinstance(error, RankError):
            pass
        elif rank == 0:
            print(render(error.diagnostics, "full").rstrip("\n"), file=sys.stderr, flush=True)
        else:
            # The launcher kills all ranks when the first one exits: rank 0 must print before that.
            time.sleep(HEAD_START_SECONDS)

    sys.excepthook = hook

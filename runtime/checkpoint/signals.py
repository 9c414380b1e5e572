"""A signal that asks a job to save and end, such as the SIGTERM of torchrun or Slurm."""

from __future__ import annotations

import _thread
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from moec.runtime.ranks.wakeup import Handler, is_of_wakeup

OF_WORKERS = frozenset((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
"""Signals that ask a job to save. A scheduler sends them to the workers of a `DataLoader` too, which the job needs."""
LOADERS = "torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader"
"""Modules that start workers."""
REPEAT_SECONDS = 10.0
"""A launcher and a scheduler may both send the signal: a second one within this time is ignored."""


def spare_workers() -> None:
    """From now on a signal of `OF_WORKERS` ends a worker that a `DataLoader` forks only if this process sends it.

    Workers that are started in another way (`multiprocessing_context`) stay as they are.
    """
    global _spares
    if not _spares:
        _spares = True
        os.register_at_fork(after_in_child=_spare)


_spares = _is_worker = False


def _spare() -> None:
    global _is_worker
    if _is_worker:  # a program that a worker starts should end by the signals
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_WORKERS)
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in LOADERS:
        frame = frame.f_back
    if frame is not None:
        _is_worker = True
        subprocess.Popen._execute_child = _forking(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
        signal.pthread_sigmask(signal.SIG_BLOCK, OF_WORKERS)
        _thread.start_new_thread(_end_by_parent, ())


def _forking(execute: Any) -> Any:
    """`Popen._execute_child`, which forks without `_spare` where there is no `preexec_fn`."""

    @functools.wraps(execute)
    def started(self: Any, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> Any:
        return execute(self, args, executable, preexec_fn or _nothing, *others)

    return started


def _nothing() -> None:
    pass


def _end_by_parent() -> None:
    """Ends the worker if its parent sends a signal, as torch's handler of workers does for SIGTERM."""
    while (told := signal.sigwaitinfo(OF_WORKERS)).si_pid != os.getppid():
        pass
    os._exit(0 if told.si_signo == signal.SIGTERM else 128 + told.si_signo)


class SignalNotice:
    """Notes signals instead of ending the process. A much later second one ends it, unless the last save has begun."""

    def __init__(self) -> None:
        self._handler = Handler(self._note)
        self._before: dict[int, Any] = {}
        self._came: dict[int, float] = {}
        self._holds = False

    def has_arrived(self, number: int) -> bool:
        """Whether the signal has arrived since the first call, which begins to note it. Call it in the main thread."""
        if number not in self._before:
            self._before[number] = self._handler.install(number)
        return number in self._came

    def hold(self) -> None:
        """From now on a second signal has no effect: the last save is under way."""
        self._holds = True

    def end(self, number: int) -> NoReturn:
        """Ends the process by the signal's default effect, whatever handled it before."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        _end(number)

    @contextmanager
    def leaving(self, error: BaseException | None) -> Iterator[None]:
        """A context for the last wait of a job, which may end with `error`; then the signals take effect.

        Restores the former handlers and sends them the signals that have arrived. If the handler was the watch's, or
        there was none, the signal ends the process after the error, if any, is printed.
        """
        self.hold()
        try:
            yield
        except BaseException as failure:
            error = failure
            raise
        finally:
            for number, before in self._before.items():
                if signal.getsignal(number) is self._handler:
                    gone = before is None or (is_of_wakeup(before) and before.ended)  # of a job that has ended earlier
                    signal.signal(number, signal.SIG_DFL if gone else before)
            # Only now: `signal.signal` runs the handlers of signals that are pending.
            for number in list(self._came):
                before = self._before[number]
                if before in (None, signal.SIG_DFL) or is_of_wakeup(before):
                    if isinstance(error, Exception):
                        sys.excepthook(type(error), error, error.__traceback__)
                    self.end(number)
                os.kill(os.getpid(), number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        first = self._came.setdefault(number, now)
        if now - first > REPEAT_SECONDS and not self._holds:
            _end(number)


def _end(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # some signals end nothing by default

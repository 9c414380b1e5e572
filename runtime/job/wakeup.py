"""Waking a thread by a signal.

Python runs a signal's handler in the main thread once it returns from C++, which a collective that hangs never does.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Wakeup:
    """A pipe that a thread sleeps on. `wake` wakes it, and so does SIGTERM, even while the main thread is in C++."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self.write, False)

    def sleep(self, seconds: float) -> bool:
        """Whether SIGTERM came meanwhile."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        return bool(ready) and signal.SIGTERM in os.read(self._read, 1024)

    def wake(self) -> None:
        os.write(self.write, b"\0")

    def close(self) -> None:
        os.close(self._read)
        os.close(self.write)


@contextmanager
def woken_by_sigterm() -> Iterator[Wakeup]:
    """SIGTERM wakes it, and does nothing else, if nobody handles it yet and this is the main thread."""
    wakeup = Wakeup()
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    outer = -1
    if mine:
        signal.signal(signal.SIGTERM, _nothing)
        outer = signal.set_wakeup_fd(wakeup.write, warn_on_full_buffer=False)
        _forget_in_children()
    try:
        yield wakeup
    finally:
        if mine:
            signal.set_wakeup_fd(outer)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wakeup.close()


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: the byte in the pipe wakes the thread; a handler would wait until the main thread is in Python."""


_forgets = False
_mask: set[signal.Signals] = set()


def _forget_in_children() -> None:
    """A forked child, such as a data loader's worker, has its parent's pipe: what ends it must not end the parent."""
    global _forgets
    if not _forgets:
        # Held back meanwhile: a signal between the fork and the child's first step would still go to the pipe.
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
        _forgets = True


def _hold() -> None:
    global _mask
    _mask = {s for s in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if isinstance(s, signal.Signals)}


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _forget() -> None:
    if signal.getsignal(signal.SIGTERM) is _nothing:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()

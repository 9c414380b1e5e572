"""Wakes a thread by a signal.

Python runs a signal's handler in the main thread after that returns from C++, which it never does in a collective that
hangs. A byte in a pipe wakes another thread instead.
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
    """A pipe that a thread sleeps on. `wake` and SIGTERM write to it, also while the main thread is in C++."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self.write, False)

    def sleep(self, seconds: float) -> bool:
        """Sleeps until `wake`, SIGTERM or the timeout; returns whether SIGTERM came."""
        poll = select.poll()  # `select.select` takes no file descriptor above 1,023
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(1000 * seconds)) and signal.SIGTERM in os.read(self._read, 1024)

    def wake(self) -> None:
        os.write(self.write, b"\0")

    def close(self) -> None:
        os.close(self._read)
        os.close(self.write)


@contextmanager
def woken_by_sigterm() -> Iterator[Wakeup]:
    """Makes SIGTERM wake it and do nothing else, in the main thread and if SIGTERM has no handler yet."""
    wakeup = Wakeup()
    unset = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    outer = -1
    if unset:
        signal.signal(signal.SIGTERM, _nothing)
        outer = signal.set_wakeup_fd(wakeup.write, warn_on_full_buffer=False)
        _forget_in_children()
    try:
        yield wakeup
    finally:
        if unset:
            signal.set_wakeup_fd(outer)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wakeup.close()


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: the byte in the pipe wakes the thread."""


_forgets = False
_mask: set[signal.Signals] = set()


def _forget_in_children() -> None:
    """Resets SIGTERM in forked children, such as a data loader's workers: they inherit the pipe of their parent."""
    global _forgets
    if not _forgets:
        # SIGTERM is blocked during the fork: until the child has reset it, it would write to the parent's pipe.
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

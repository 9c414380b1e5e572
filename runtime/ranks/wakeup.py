"""Wakes a thread by a signal.

Python runs a signal's handler in the main thread after that returns from C++, which it never does in a collective that
hangs. A byte in a pipe wakes another thread instead.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Handler:
    """A handler of a signal that forked children, such as a data loader's workers, do not inherit."""

    def __init__(self, run: Callable[[int], None]) -> None:
        self._run = run

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._run(number)

    def install(self, number: int) -> Any:
        """Handles the signal from now on. Returns the previous handler. Called in the main thread only."""
        previous = signal.signal(number, self)
        if not _handled:
            # Signals are blocked during a fork: until the child has reset them, it would do what its parent does.
            os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
        _handled.add(number)
        return previous


class _WakeupHandler(Handler):
    """The handler of `woken_by_sigterm`. `ended`: the block of `woken_by_sigterm` has ended."""

    ended = False


class Wakeup:
    """A pipe that a thread sleeps on. `wake` and SIGTERM write to it, also while the main thread is in C++."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        self.handler = _WakeupHandler(self._note)
        self._has_come = False

    def sleep(self, seconds: float) -> bool:
        """Sleeps until `wake`, a signal or the timeout; returns whether SIGTERM came to `handler`.

        Python writes a byte for every signal that it handles: one that a later handler of SIGTERM gets does not count.
        """
        poll = select.poll()  # `select.select` takes no file descriptor above 1,023
        poll.register(self._read, select.POLLIN)
        if not poll.poll(1000 * seconds) or signal.SIGTERM not in os.read(self._read, 1024):
            return False
        return self._has_come or signal.getsignal(signal.SIGTERM) is self.handler

    def wake(self) -> None:
        os.write(self.write, b"\0")

    def close(self) -> None:
        os.close(self._read)
        os.close(self.write)

    def _note(self, number: int) -> None:
        """Ends nothing: the byte in the pipe wakes the thread."""
        self._has_come = True


@contextmanager
def woken_by_sigterm() -> Iterator[Wakeup]:
    """Yields a `Wakeup` that SIGTERM wakes, and makes SIGTERM do nothing else. Only in the main thread, and only if
    SIGTERM has no handler yet."""
    global _pipe
    wakeup = Wakeup()
    unset = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    outer = -1
    if unset:
        wakeup.handler.install(signal.SIGTERM)
        outer = signal.set_wakeup_fd(wakeup.write, warn_on_full_buffer=False)
        _pipe = wakeup.write
    try:
        yield wakeup
    finally:
        if unset:
            signal.set_wakeup_fd(outer)
            _pipe = -1
            wakeup.handler.ended = True
            if signal.getsignal(signal.SIGTERM) is wakeup.handler:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wakeup.close()


def is_of_wakeup(handler: Any) -> bool:
    """Whether a handler is the handler of `woken_by_sigterm`: without it, SIGTERM would have its default effect."""
    return isinstance(handler, _WakeupHandler)


_handled: set[int] = set()
"""The signals that a `Handler` has handled."""
_pipe = -1
"""The file descriptor that `woken_by_sigterm` makes Python write to."""
_mask: set[signal.Signals] = set()


def _hold() -> None:
    global _mask
    _mask = {s for s in signal.pthread_sigmask(signal.SIG_BLOCK, _handled) if isinstance(s, signal.Signals)}


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _forget() -> None:
    outer = signal.set_wakeup_fd(-1)
    if outer not in (-1, _pipe):
        signal.set_wakeup_fd(outer)
    for number in _handled:
        if isinstance(signal.getsignal(number), Handler):
            signal.signal(number, signal.SIG_DFL)
    _release()

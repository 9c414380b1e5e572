"""A thread that SIGTERM wakes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings

from moec.runtime.ranks.wakeup import woken_by_sigterm


def test_sigterm_wakes_and_does_not_kill():
    before = signal.getsignal(signal.SIGTERM)
    with woken_by_sigterm() as wakeup:
        assert not wakeup.sleep(0.01)
        wakeup.wake()
        assert not wakeup.sleep(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wakeup.sleep(10)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_forked_child_is_killed_and_wakes_nobody():
    with woken_by_sigterm() as wakeup:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forks with running threads, as data loaders do
            child.start()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert not wakeup.sleep(0.05)


def test_a_handler_of_the_users_own_stays():
    def own(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, own)
    try:
        with woken_by_sigterm():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

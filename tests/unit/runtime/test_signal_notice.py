"""Signals that a job notes instead of ending."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from moec.runtime.checkpoint import signals
from moec.runtime.checkpoint.signals import SignalNotice
from moec.runtime.ranks.wakeup import woken_by_sigterm


def ending(function: Callable[[], None]) -> int | None:
    """How a process that calls `function` ends."""
    child = multiprocessing.get_context("fork").Process(target=function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks with running threads
        child.start()
    child.join(20)
    return child.exitcode


def noted(notice: SignalNotice) -> None:
    """Sends one SIGTERM, which is noted."""
    assert not notice.has_arrived(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.has_arrived(signal.SIGTERM)


def two_at_once() -> None:
    noted(SignalNotice())
    os.kill(os.getpid(), signal.SIGTERM)


def two_far_apart() -> None:
    signals.REPEAT_SECONDS = 0.01
    noted(SignalNotice())
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def two_far_apart_while_the_last_save_is_under_way() -> None:
    signals.REPEAT_SECONDS = 0.01
    notice = SignalNotice()
    noted(notice)
    notice.hold()
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def end_by_a_signal_without_effect() -> None:
    SignalNotice().end(signal.SIGCHLD)


def a_watch_that_a_noted_signal_does_not_wake() -> None:
    with woken_by_sigterm() as wakeup:
        noted(SignalNotice())
        assert not wakeup.sleep(0.05)


def a_watched_job_that_ends_with_a_noted_signal() -> None:
    with woken_by_sigterm():
        notice = SignalNotice()
        with notice.leaving(None):
            noted(notice)


@pytest.mark.parametrize(
    ("what", "status"),
    [
        (two_at_once, 0),
        (two_far_apart, -signal.SIGTERM),
        (two_far_apart_while_the_last_save_is_under_way, 0),
        (a_watch_that_a_noted_signal_does_not_wake, 0),
        (a_watched_job_that_ends_with_a_noted_signal, -signal.SIGTERM),
        (end_by_a_signal_without_effect, 128 + signal.SIGCHLD),
    ],
)
def test_a_process_with(what: Callable[[], None], status: int) -> None:
    assert ending(what) == status


def test_a_signal_before_the_notice_wakes_the_watch() -> None:
    with woken_by_sigterm() as wakeup:
        os.kill(os.getpid(), signal.SIGTERM)
        notice = SignalNotice()
        assert not notice.has_arrived(signal.SIGTERM)
        assert wakeup.sleep(10)
        with notice.leaving(None):
            pass


def test_a_handler_of_the_users_own_gets_the_signal_when_the_job_ends() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        notice = SignalNotice()
        with notice.leaving(None):
            assert not notice.has_arrived(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert notice.has_arrived(signal.SIGUSR1)
            assert not seen
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_is_killed_by_a_signal_that_its_parent_notes() -> None:
    notice = SignalNotice()
    with notice.leaving(None):
        assert not notice.has_arrived(signal.SIGUSR2)
        assert ending(lambda: os.kill(os.getpid(), signal.SIGUSR2)) == -signal.SIGUSR2
        assert not notice.has_arrived(signal.SIGUSR2)


def a_job_that_ends_before_another_one() -> None:
    """The second notices signals over the handler of the first, which ends first."""
    with ExitStack() as second:
        with woken_by_sigterm():
            second.enter_context(woken_by_sigterm())
            notice = SignalNotice()
            assert not notice.has_arrived(signal.SIGTERM)
            second.enter_context(notice.leaving(None))
        assert signal.getsignal(signal.SIGTERM) not in (None, signal.SIG_DFL), "noted until the second ends"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def test_the_handler_of_a_job_that_has_ended_does_not_come_back() -> None:
    assert ending(a_job_that_ends_before_another_one) == -signal.SIGTERM

"""Watches a job's collectives: a rank that dies or stalls ends the job with one message.

Each rank records the collective that it is in, or when it left the last one. If a collective fails or takes too long,
or the launcher ends the process, every rank that still can writes its position to the job's store. The first rank to
notice reads the positions and names the rank that blocks the others (`verdict.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moec.grammar.diagnostics import render
from moec.runtime.errors import RankError
from moec.runtime.ranks.groups import HOST, STAGE, plain_name, resolve, watch_of
from moec.runtime.ranks.verdict import Departed, Place, Position, RankState, Verdict, from_json, judge, to_json
from moec.runtime.ranks.wakeup import Wakeup, woken_by_sigterm

MARGIN_SECONDS = 10.0
"""Ranks are asked this long before the timeout, or a quarter of it: their answers arrive before the wait ends."""
TERMINATED_SECONDS = 3.0
"""The time for answers after the launcher's SIGTERM: torchrun kills 30 s later."""
EXIT_SECONDS = 10.0
"""The time in which a rank may end by itself after a verdict."""
BEATS = 8
"""The number of signs of life of a rank, in the time after which others ask for its position."""

A_STAGE = "the ranks of a stage"
"""The group of a stage, in messages."""

Layer = torch.Tensor | None
"""The number of a layer, 0-d int64 on CPU; None outside of layers."""


_yield_core = getattr(os, "sched_yield", lambda: None)
"""Lets gloo's thread run, which keeps the tensors of a collective until it does: the next op can reuse their memory."""


class collective:  # noqa: N801 - used as a statement
    """`with collective("all_reduce", group, site) as peers:` around a collective over `peers`, or the wait for one.

    `group` is a name that `groups.py` knows; `site` says which part of the model it serves, with `{layer}` for the
    number `layer`. `begins` is false for the wait for a collective that began before. `ranks`: those of the group that
    take part, for a message between two, whose site no other message of a step has. Raises `RankError` in place of
    torch's error if another rank has failed.
    """

    __slots__ = ("_begins", "_group", "_layer", "_name", "_ranks", "_site", "_watch")

    def __init__(
        self, name: str, group: str, site: str, layer: Layer = None, *, begins: bool = True,
        ranks: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._name, self._group, self._site, self._layer, self._begins = name, group, site, layer, begins
        self._ranks = ranks

    def __enter__(self) -> dist.ProcessGroup:
        peers = resolve(self._group)
        self._watch = watch_of(self._group)
        if self._watch is not None:
            site = located(self._site, self._layer)
            self._watch.enter(self._name, plain_name(self._group), self._ranks or peers, site, self._begins)
        return peers

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._watch is None:
            return
        if isinstance(error, RuntimeError):
            verdict = self._watch.inquire(overdue="timed out" in str(error).lower(), error=error)
            if verdict.text:
                raise RankError(verdict.text) from error
        self._watch.leave()
        _yield_core()


def located(site: str, layer: Layer) -> str:
    """`site` with the layer's number for `{layer}`."""
    return site if layer is None else site.replace("{layer}", str(int(layer)))


def backward_of(site: str) -> str:
    """The site of the backward pass of `site`."""
    return f"backward of {site}" if site else ""


@contextmanager
def watch(store: Store, rank: int, world_size: int, timeout: float) -> Iterator[Watch]:
    """Watches the collectives of a job until the block ends. `timeout`: seconds that one may take.

    `store`: a store of all ranks, of this job alone, over a connection that no other thread waits on. Handles SIGTERM
    in the main thread, if SIGTERM has no handler yet, and until it gets another one.
    """
    with woken_by_sigterm() as wakeup:
        rank_watch = Watch(store, rank, world_size, timeout, wakeup)
        try:
            yield rank_watch
        except BaseException as error:
            if not isinstance(error, RankError):
                rank_watch.publish(Departed(_sentence(error)))
            raise
        else:
            rank_watch.publish(Departed())
        finally:
            rank_watch.stop()


class _Timed(NamedTuple):
    """A `Position` with the time at which it began instead of its seconds."""

    inside: bool
    place: Place | None
    since: float
    newest: bool = True


class Watch:
    """The watch of one rank. The training thread calls `enter` and `leave`; a second thread does the rest."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float, wakeup: Wakeup) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._store, self._wakeup = store, wakeup
        self.seconds = 0.0
        """Seconds that this rank's host has spent in collectives."""
        self._counts: dict[str, int] = {}
        # Never changed in place: the other thread always reads a complete one.
        self._position = _Timed(False, None, time.monotonic())
        self._places: dict[tuple[str, str, str], Place] = {}
        self._lock, self._publishing = threading.Lock(), threading.Lock()
        self._has_departed = False
        self._verdict: Verdict | None = None
        self._stopping = False
        self.tick = min(1.0, max(0.05, timeout / 50))
        self._patience = timeout - min(MARGIN_SECONDS, timeout / 4)
        self._next_beat = 0.0
        self._thread = threading.Thread(target=self._run, name="moec-watch", daemon=True)
        self._thread.start()

    # ---- the training thread ---------------------------------------------------------------------------

    def enter(self, name: str, group: str, peers: dist.ProcessGroup | tuple[int, ...], site: str, begins: bool) -> None:
        if self._verdict is not None:
            raise RankError(self._verdict.text)
        place = self._places.get((name, group, site))
        if place is None:
            ranks = peers if isinstance(peers, tuple) else tuple(dist.get_process_group_ranks(peers))
            shown = group if group not in (HOST, STAGE) else "" if len(ranks) == self.world_size else A_STAGE
            place = self._places[name, group, site] = Place(name, shown, ranks, site)
        if begins:
            key = place.key()
            self._counts[key] = self._counts.get(key, 0) + 1
        self._position = _Timed(True, place, time.monotonic(), begins)

    def leave(self) -> None:
        entered, now = self._position, time.monotonic()
        self.seconds += now - entered.since
        self._position = _Timed(False, entered.place, now)

    def inquire(self, *, overdue: bool, error: BaseException | None = None, seconds: float | None = None) -> Verdict:
        """Finds the rank to blame: asks all ranks for their positions, up to `seconds`. One rank prints the verdict.

        `overdue`: a rank has waited too long, so a rank that answers may be to blame. `error`: the exception of this
        rank's collective; if no other rank is to blame, the verdict has no text.
        """
        with self._lock:
            if self._verdict is None:
                self._verdict = self._inquire(overdue, error, 2 * self.tick + 1.0 if seconds is None else seconds)
            return self._verdict

    def answer(self) -> None:
        """Answers another rank with this rank's position, and waits for the verdict."""
        with self._lock:
            if self._verdict is None:
                self._publish_position()
                self._verdict = self._read_verdict(2 * self.tick + 6.0) or self._judge(True, None, 1.0)

    def publish(self, state: RankState) -> None:
        """Writes this rank's position to the store, unless it has left. The store's process may be gone."""
        with self._publishing, suppress(RuntimeError):
            if not self._has_departed:
                self._has_departed = isinstance(state, Departed)
                self._store.set(f"at_{self.rank}", to_json(state))

    def stop(self) -> None:
        self._stopping = True
        self._wakeup.wake()
        self._thread.join()

    # ---- other threads, while they wait outside of collectives -----------------------------------------

    @property
    def verdict(self) -> Verdict | None:
        """The verdict about a rank that blocks the job; None while there is none."""
        return self._verdict

    def beats_of(self, rank: int) -> int:
        """A count that grows while the process of `rank` lives, from the first call on any rank on."""
        if not self._store.check(["beats_wanted"]):
            self._store.set("beats_wanted", "")
        return self._store.add(f"beats_{rank}", 0)

    # ---- the second thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._beat()
            terminated = self._wakeup.sleep(self.tick)
            if self._stopping:
                return
            if terminated:
                self.inquire(overdue=False, seconds=TERMINATED_SECONDS)
                os._exit(128 + signal.SIGTERM)
            position = self._position
            if position.inside and time.monotonic() - position.since > self._patience:
                self.inquire(overdue=True)
            elif self._is_asked():
                self.answer()
            if self._verdict is not None:
                self._wait_for_the_end()

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._patience / BEATS
            with suppress(RuntimeError):  # the store is gone: the collectives will fail
                if self._store.check(["beats_wanted"]):
                    self._store.add(f"beats_{self.rank}", 1)

    def _is_asked(self) -> bool:
        try:
            return bool(self._store.check(["alarm"]))
        except RuntimeError:
            return False  # the store is gone: the collectives will fail

    def _wait_for_the_end(self) -> None:
        """Ends the process if neither the training thread's next collective nor torch's timeout does."""
        deadline = time.monotonic() + self.timeout - self._patience + EXIT_SECONDS
        while not self._stopping and time.monotonic() < deadline:
            if self._wakeup.sleep(self.tick):
                os._exit(128 + signal.SIGTERM)
        if not self._stopping:
            os._exit(1)

    def _publish_position(self) -> None:
        timed, counts = self._position, dict(self._counts)
        self.publish(Position(timed.inside, timed.place, time.monotonic() - timed.since, counts, timed.newest))

    def _inquire(self, overdue: bool, error: BaseException | None, seconds: float) -> Verdict:
        self._publish_position()
        try:
            self._store.set("alarm", "")
            if self._store.add("speaker", 1) > 1:
                return self._read_verdict(seconds + 5.0) or self._judge(overdue, error, 1.0)
            verdict = self._judge(overdue, error, seconds)
            self._store.set("verdict", verdict.text or f"rank {self.rank} ended with {_sentence(error)}")
            return verdict
        except RuntimeError as store_error:
            text = f"the process that holds the job's store is gone: {_sentence(store_error)}"
            return self._print_once(Verdict(text))

    def _read_verdict(self, seconds: float) -> Verdict | None:
        """The verdict of the rank that judges, or None if none came in time."""
        is_written = _until(lambda: self._store.check(["verdict"]), seconds, self.tick)
        return Verdict(self._store.get("verdict").decode(), printed=True) if is_written else None

    def _judge(self, overdue: bool, error: BaseException | None, seconds: float) -> Verdict:
        states: dict[int, RankState] = {}

        def answered() -> bool:
            for rank in range(self.world_size):
                # Read again even after an answer: the rank may have left after it.
                if not isinstance(states.get(rank), Departed) and self._store.check([f"at_{rank}"]):
                    states[rank] = from_json(self._store.get(f"at_{rank}"))
            failed = any(isinstance(state, Departed) and state.error for state in states.values())
            return failed or len(states) == self.world_size

        _until(answered, seconds, self.tick)
        verdict = judge(states, self.world_size, overdue=overdue)
        if verdict is not None:
            return self._print_once(verdict)
        return Verdict("" if error else "the job was ended from outside", printed=True)

    def _print_once(self, verdict: Verdict) -> Verdict:
        if not verdict.printed:
            print(render(RankError(verdict.text).diagnostics, "full").rstrip("\n"), file=sys.stderr, flush=True)
        return verdict


def _until(condition: Callable[[], bool], seconds: float, tick: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(min(tick, 0.1))
    return True


def _sentence(error: BaseException | None) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__

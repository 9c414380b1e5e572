"""Watches over a job's collectives, so that a rank that dies or stalls ends it with one message and not with none.

Each rank keeps where it is: in which collective, or since when in none. Nothing more happens until something is wrong:
a collective fails or takes too long, or the launcher ends the process. Then every rank that still can writes down where
it is, in the job's store; the first rank to notice reads it and says which rank blocks the others (`verdict.py`).
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
from torch._C._distributed_c10d import PrefixStore, Store

from moec.grammar.diagnostics import render
from moec.runtime.errors import RankError
from moec.runtime.job.groups import plain_name, resolve, watch_of
from moec.runtime.job.verdict import Left, Place, Position, Verdict, Word, from_json, judge, to_json
from moec.runtime.job.wakeup import Wakeup, woken_by_sigterm

MARGIN_SECONDS = 10.0
"""So long before the timeout, or a quarter of it, the others are asked: the answer is there when the wait ends."""
TERMINATED_SECONDS = 3.0
"""How long answers may take once the launcher ends the job: torchrun gives 30 s before it kills."""
EXIT_SECONDS = 10.0
"""What a rank has to end by itself after a verdict."""

_launches = 0


Layer = torch.Tensor | None
"""The number of a layer, 0-d int64 on CPU; none for what belongs to no layer."""


class collective:  # noqa: N801 - reads as the statement that it is
    """`with collective("all_reduce", group, site) as peers:` around a collective over `peers`, or the wait for one.

    `group` is a name that `groups.py` knows; `site` says which part of the model it serves, `{layer}` in it
    standing for the number `layer`.
    `begins` is false where it was begun before, and is only waited for. Raises `RankError` in the place of torch's
    error where another rank has failed.
    """

    __slots__ = ("_begins", "_group", "_layer", "_name", "_site", "_watch")

    def __init__(self, name: str, group: str, site: str, layer: Layer = None, *, begins: bool = True) -> None:
        self._name, self._group, self._site, self._layer, self._begins = name, group, site, layer, begins

    def __enter__(self) -> dist.ProcessGroup:
        peers = resolve(self._group)
        self._watch = watch_of(self._group)
        if self._watch is not None:
            self._watch.enter(
                self._name, plain_name(self._group), peers, located(self._site, self._layer), self._begins
            )
        return peers

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._watch is None:
            return
        if isinstance(error, RuntimeError):
            verdict = self._watch.inquire(overdue="timed out" in str(error).lower(), error=error)
            if verdict.text:
                raise RankError(verdict.text) from error
        self._watch.leave()


def located(site: str, layer: Layer) -> str:
    """`site` with the number of the layer in the place of `{layer}`."""
    return site if layer is None else site.replace("{layer}", str(int(layer)))


def backward_of(site: str) -> str:
    """The site of what backward does there."""
    return f"backward of {site}" if site else ""


@contextmanager
def watch(store: Store, rank: int, world_size: int, timeout: float) -> Iterator[Watch]:
    """Gives what watches over the collectives of a job until the block ends. `timeout`: seconds that one may take.

    `store` is one that all ranks share, and that nobody else waits on. Handles SIGTERM where nobody does and this is
    the main thread.
    """
    global _launches
    _launches += 1
    prefixed = PrefixStore(f"watch_{_launches}", store)
    with woken_by_sigterm() as wakeup:
        own = Watch(prefixed, rank, world_size, timeout, wakeup)
        try:
            yield own
        except BaseException as error:
            if not isinstance(error, RankError):
                own.say(Left(_sentence(error)))
            raise
        else:
            own.say(Left())
        finally:
            own.stop()


class _Here(NamedTuple):
    """A `Position`, but with the time when it was taken up."""

    inside: bool
    place: Place | None
    since: float
    newest: bool = True


class Watch:
    """One rank's part. `enter` and `leave` are for the training thread; the rest is done by a thread of its own."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float, wakeup: Wakeup) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._store, self._wakeup = store, wakeup
        self._counts: dict[str, int] = {}
        # Replaced as a whole, so that the other thread never sees half of one.
        self._here = _Here(False, None, time.monotonic())
        self._places: dict[tuple[str, str, str], Place] = {}
        self._lock, self._saying = threading.Lock(), threading.Lock()
        self._left = False
        self._verdict: Verdict | None = None
        self._stopping = False
        self.tick = min(1.0, max(0.05, timeout / 50))
        self._patience = timeout - min(MARGIN_SECONDS, timeout / 4)
        self._thread = threading.Thread(target=self._run, name="moec-watch", daemon=True)
        self._thread.start()

    # ---- the training thread ---------------------------------------------------------------------------

    def enter(self, name: str, group: str, peers: dist.ProcessGroup, site: str, begins: bool) -> None:
        if self._verdict is not None:
            raise RankError(self._verdict.text)
        place = self._places.get((name, group, site))
        if place is None:
            ranks = dist.get_process_group_ranks(peers)
            place = self._places[name, group, site] = Place(name, group, tuple(ranks), site)
        if begins:
            key = place.key()
            self._counts[key] = self._counts.get(key, 0) + 1
        self._here = _Here(True, place, time.monotonic(), begins)

    def leave(self) -> None:
        self._here = _Here(False, self._here.place, time.monotonic())

    def inquire(self, *, overdue: bool, error: BaseException | None = None, seconds: float | None = None) -> Verdict:
        """Finds the rank to blame: asks all ranks where they are, for up to `seconds`. One rank prints the verdict.

        `overdue`: a rank has waited too long, so that a rank that answers may be to blame. `error`: the exception of
        this rank's collective; if no other rank is to blame, the verdict has no text.
        """
        with self._lock:
            if self._verdict is None:
                self._verdict = self._inquire(overdue, error, 2 * self.tick + 1.0 if seconds is None else seconds)
            return self._verdict

    def answer(self) -> None:
        """Answers another rank's question where this rank is, and waits for the verdict."""
        with self._lock:
            if self._verdict is None:
                self._say_where()
                self._verdict = self._hear(2 * self.tick + 6.0) or self._judge(True, None, 1.0)

    def say(self, word: Word) -> None:
        """Tells the others where this rank is; once it has left, no more. The store may be gone with its process."""
        with self._saying, suppress(RuntimeError):
            if not self._left:
                self._left = isinstance(word, Left)
                self._store.set(f"at_{self.rank}", to_json(word))

    def stop(self) -> None:
        self._stopping = True
        self._wakeup.wake()
        self._thread.join()

    # ---- its own thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            terminated = self._wakeup.sleep(self.tick)
            if self._stopping:
                return
            if terminated:
                self.inquire(overdue=False, seconds=TERMINATED_SECONDS)
                os._exit(128 + signal.SIGTERM)
            here = self._here
            if here.inside and time.monotonic() - here.since > self._patience:
                self.inquire(overdue=True)
            elif self._asked():
                self.answer()
            if self._verdict is not None:
                self._wait_for_the_end()

    def _asked(self) -> bool:
        try:
            return bool(self._store.check(["alarm"]))
        except RuntimeError:
            return False  # the store is gone: the collectives will tell

    def _wait_for_the_end(self) -> None:
        """The training thread raises at its next collective, or torch's timeout ends its last. If not, this does."""
        deadline = time.monotonic() + self.timeout - self._patience + EXIT_SECONDS
        while not self._stopping and time.monotonic() < deadline:
            if self._wakeup.sleep(self.tick):
                os._exit(128 + signal.SIGTERM)
        if not self._stopping:
            os._exit(1)

    def _say_where(self) -> None:
        here, counts = self._here, dict(self._counts)
        self.say(Position(here.inside, here.place, time.monotonic() - here.since, counts, here.newest))

    def _inquire(self, overdue: bool, error: BaseException | None, seconds: float) -> Verdict:
        self._say_where()
        try:
            self._store.set("alarm", "")
            if self._store.add("speaker", 1) > 1:
                return self._hear(seconds + 5.0) or self._judge(overdue, error, 1.0)
            verdict = self._judge(overdue, error, seconds)
            self._store.set("verdict", verdict.text or f"rank {self.rank} ended with {_sentence(error)}")
            return verdict
        except RuntimeError as gone:
            return self._speak(Verdict(f"the process that holds the job's store is gone: {_sentence(gone)}"))

    def _hear(self, seconds: float) -> Verdict | None:
        """The verdict of the rank that judges, or None if none came in time."""
        heard = _until(lambda: self._store.check(["verdict"]), seconds, self.tick)
        return Verdict(self._store.get("verdict").decode(), said=True) if heard else None

    def _judge(self, overdue: bool, error: BaseException | None, seconds: float) -> Verdict:
        words: dict[int, Word] = {}

        def answered() -> bool:
            for rank in range(self.world_size):
                # Read again even after an answer: the rank may have left since.
                if not isinstance(words.get(rank), Left) and self._store.check([f"at_{rank}"]):
                    words[rank] = from_json(self._store.get(f"at_{rank}"))
            failed = any(isinstance(word, Left) and word.error for word in words.values())
            return failed or len(words) == self.world_size

        _until(answered, seconds, self.tick)
        found = judge(words, self.world_size, overdue=overdue)
        if found is not None:
            return self._speak(found)
        return Verdict("" if error else "the job was ended from outside", said=True)

    def _speak(self, verdict: Verdict) -> Verdict:
        if not verdict.said:
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

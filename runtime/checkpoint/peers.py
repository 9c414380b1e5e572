"""Messages between ranks in a background thread: through the job's store, which each rank polls.

Collectives of the job's groups would interleave with those of a step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from moec.runtime.errors import RankError

if TYPE_CHECKING:
    from moec.runtime.ranks.watch import Watch

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.2
"""Seconds between two polls; each pause is half as long again as the last."""

PIECE_BYTES = 1 << 20
"""Bytes of one value in the store: torch's TCPStore drops a connection that sends more than 8 MiB at once."""


class Peers:
    """The ranks of one job. `store`: over a connection that no other thread waits on; None for a single rank.

    A wait may take any time while all ranks live. It raises `RankError` when `watch` knows of a rank that is gone, or
    when the next rank's watch has been silent for the job's timeout.
    """

    def __init__(self, store: Store | None, rank: int, world_size: int, watch: Watch | None = None) -> None:
        store = store or HashStore()
        # Every rank enters the same jobs over one store, so that its own count of them tells one from another.
        number = store.add(f"checkpoints_{rank}", 1)
        self._store = PrefixStore(f"checkpoints_{number}", store)
        self._watch = watch
        self.rank, self.world_size = rank, world_size
        self._abandoned = threading.Event()
        self._broadcast_keys: list[str] = []

    def abandon(self) -> None:
        """Ends every wait with `RankError`: another rank is gone."""
        self._abandoned.set()

    def send(self, key: str, content: Any) -> None:
        """Sends `content`, plain JSON, to rank 0, which calls `collect`."""
        self._put(f"{key}/{self.rank}", content)

    def collect(self, key: str) -> list[Any]:
        """The message of every rank, by rank. All ranks have then received all earlier broadcasts."""
        messages = []
        for rank in range(self.world_size):
            messages.append(self._wait(f"{key}/{rank}"))
            self._forget(f"{key}/{rank}")
        while self._broadcast_keys:
            self._forget(self._broadcast_keys.pop())
        return messages

    def broadcast(self, key: str, content: Any) -> None:
        """Of rank 0: sends `content`, plain JSON, to all ranks, which call `receive`."""
        self._broadcast_keys.append(key)
        self._put(key, content)

    def receive(self, key: str) -> Any:
        """The message that rank 0 broadcasts."""
        return self._wait(key)

    def barrier(self, key: str) -> None:
        """Waits until every rank has come here. Unlike a collective it may take any time."""
        with _lost_store():
            if self._store.add(f"{key}/arrived", 1) == self.world_size:
                self._put(key, 0)
            self._wait(key)
            if self._store.add(f"{key}/left", 1) == self.world_size:
                for used_key in (key, f"{key}/arrived", f"{key}/left"):
                    self._store.delete_key(used_key)

    def _put(self, key: str, content: Any) -> None:
        """Sets `key` to plain JSON, in several values where it is long; the first says how many."""
        text = json.dumps(content)
        pieces = [text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES)]
        with _lost_store():
            for number, piece in enumerate(pieces[1:], start=1):
                self._store.set(f"{key}#{number}", piece)
            self._store.set(key, f"{len(pieces)} {pieces[0]}")

    def _wait(self, key: str) -> Any:
        pause, watched = FIRST_PAUSE, None
        with _lost_store():
            while not self._store.check([key]):
                if self._abandoned.is_set():
                    raise RankError("another rank is gone")
                if self._watch is not None:
                    watched = watched or _Watched(self._watch, (self.rank + 1) % self.world_size)
                    watched.require_alive()
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
            count, _, first = self._store.get(key).partition(b" ")
            rest = [self._store.get(f"{key}#{number}") for number in range(1, int(count))]
        return json.loads(b"".join([first, *rest]))

    def _forget(self, key: str) -> None:
        """Removes a message that has been read."""
        with _lost_store():
            for number in range(1, int(self._store.get(key).partition(b" ")[0])):
                self._store.delete_key(f"{key}#{number}")
            self._store.delete_key(key)


class _Watched:
    """Checks during one wait that all ranks live: each rank looks at the heartbeats of the next rank alone."""

    def __init__(self, watch: Watch, rank: int) -> None:
        self._watch, self._rank = watch, rank
        self._beats, self._since = -1, time.monotonic()
        # Beats are asked for only after a quarter of the timeout.
        self._next = self._since + watch.timeout / 4

    def require_alive(self) -> None:
        """Raises `RankError` if the watch has a verdict, or finds one because the rank is silent."""
        now, verdict = time.monotonic(), self._watch.verdict
        if verdict is None and now >= self._next:
            self._next = now + self._watch.timeout / 20
            beats = self._watch.beats_of(self._rank)
            if beats != self._beats:
                self._beats, self._since = beats, now
            elif now - self._since > self._watch.timeout:
                verdict = self._watch.inquire(overdue=True)
        if verdict is not None:
            raise RankError(verdict.text or "another rank is gone")


@contextmanager
def _lost_store() -> Iterator[None]:
    """Explains torch's error about a lost connection to the store."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).strip().partition("\n")[0]
        raise RankError(f"the process that holds the job's store is gone: {words}") from error

"""How the ranks of a job agree in a background thread: through the job's store, by asking again and again.

Collectives of the job's groups would interleave with those of a step.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from moec.runtime.errors import RankError

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.2
"""Seconds between two questions; each pause is half as long again as the last."""


PIECE_BYTES = 1 << 20
"""Bytes of one value in the store: torch's TCPStore drops a connection that sends more than 8 MiB at once."""


class Peers:
    """The ranks of one job. `store`: over a connection that no other thread waits on; None for a single rank."""

    def __init__(self, store: Store | None, rank: int, world_size: int) -> None:
        store = store or HashStore()
        # Every rank enters the same jobs over one store, so that its own count of them tells one from another.
        number = store.add(f"checkpoints_{rank}", 1)
        self._store = PrefixStore(f"checkpoints_{number}", store)
        self.rank, self.world_size = rank, world_size
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Ends every wait with `RankError`: another rank is gone."""
        self._abandoned.set()

    def send(self, key: str, content: Any) -> None:
        """Sends `content`, plain JSON, to rank 0, which calls `collect`."""
        self._put(f"{key}/{self.rank}", content)

    def collect(self, key: str) -> list[Any]:
        """What every rank sent, by rank."""
        found = []
        for rank in range(self.world_size):
            found.append(self._wait(f"{key}/{rank}"))
            self.forget(f"{key}/{rank}")
        return found

    def tell(self, key: str, content: Any) -> None:
        """Of rank 0: tells all ranks, which call `hear`."""
        self._put(key, content)

    def hear(self, key: str) -> Any:
        """What rank 0 tells."""
        return self._wait(key)

    def forget(self, key: str) -> None:
        """Removes a message that every rank has read."""
        if self._store.check([key]):
            for number in range(1, int(self._store.get(key).partition(b" ")[0])):
                self._store.delete_key(f"{key}#{number}")
        self._store.delete_key(key)

    def meet(self, key: str) -> None:
        """Waits until every rank has come here. Unlike a collective it may take any time."""
        if self._store.add(f"{key}/met", 1) == self.world_size:
            self._put(key, 0)
        self._wait(key)

    def _put(self, key: str, content: Any) -> None:
        """Sets `key` to plain JSON, in several values where it is long; the first says how many."""
        text = json.dumps(content)
        pieces = [text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], start=1):
            self._store.set(f"{key}#{number}", piece)
        self._store.set(key, f"{len(pieces)} {pieces[0]}")

    def _wait(self, key: str) -> Any:
        pause = FIRST_PAUSE
        while not self._store.check([key]):
            if self._abandoned.is_set():
                raise RankError("another rank is gone")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        count, _, first = self._store.get(key).partition(b" ")
        rest = (self._store.get(f"{key}#{number}") for number in range(1, int(count)))
        return json.loads(b"".join([first, *rest]))

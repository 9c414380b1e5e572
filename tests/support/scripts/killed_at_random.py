"""One rank of a training run whose ranks are killed at random moments: `torchrun killed_at_random.py RUN.json`.

test_random_kills.py starts it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_begun = time.monotonic()

STEPS, EVERY, KEEP = 15, 3, 2
RESTARTS = 3
TIMEOUT = 20.0
"""Seconds that a collective of these jobs may take."""
GATE = "topk(2, score = sigmoid, normalize = true, bias = online(0.002), jitter = 0.1)"
PLANS: dict[str, dict[str, Any]] = {
    "2 ranks, ep 2": {"ranks": 2, "ep": 2},
    "2 ranks, zero 3": {"ranks": 2, "ep": 1, "zero": 3},
    "3 ranks, ep 3": {"ranks": 3, "ep": 3, "experts": 6, "batch": 6},
    "4 ranks, tp 2, ep 2, zero 1": {"ranks": 4, "tp": 2, "ep": 2, "zero": 1},
    "2 ranks, homes that move": {
        "ranks": 2,
        "ep": 2,
        "adapt": "greedy(every = 2, threshold = 1.0); horizon = 1e12; clock = false",
    },
}
MOVING = "2 ranks, homes that move"


@dataclass(frozen=True)
class Kill:
    """Rank `rank` dies `delay` seconds after it has come to `place` for the `number`-th time, or else at its end.

    `number` counts from 0.
    """

    rank: int
    place: str
    number: int
    delay: float


@dataclass(frozen=True)
class Run:
    """A run of plan `plan` in the folder `folder`. `kills`: one of each attempt, in order."""

    folder: str
    plan: str
    kills: tuple[Kill, ...]

    @property
    def ranks(self) -> int:
        return int(PLANS[self.plan]["ranks"])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Run:
        data = json.loads(text)
        return Run(data["folder"], data["plan"], tuple(Kill(**kill) for kill in data["kills"]))


class Log:
    """Lines of JSON in `log.jsonl`. A line that was written outlives the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, **record: Any) -> None:
        os.write(self._file, (json.dumps({**record, "at": round(time.time(), 2)}) + "\n").encode())


class Deadly:
    """Kills this process in another thread, at a moment of the kill's own."""

    def __init__(self, run: Run, log: Log) -> None:
        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        kill = run.kills[attempt] if attempt < len(run.kills) else None
        self._kill = kill if kill is not None and kill.rank == rank else None
        self._folder, self._log, self._thread = Path(run.folder), log, threading.Thread()

    def reach(self, place: str, number: int = 0, since: float | None = None) -> None:
        """The training thread has come to `place`, or had at `since`."""
        kill = self._kill
        if kill is not None and (kill.place, kill.number) == (place, number):
            self._arm(kill, time.monotonic() if since is None else since)

    def reach_the_end(self) -> None:
        """No process ends before its kill."""
        if self._kill is not None:
            if self._thread.ident is None:
                self._arm(self._kill, time.monotonic())
            self._thread.join()

    def _arm(self, kill: Kill, since: float) -> None:
        def die() -> None:
            time.sleep(max(0.0, since + kill.delay - time.monotonic()))
            saves = [name for name in os.listdir(self._folder) if ".moec-save-" in name]
            self._log(killed=kill.rank, place=kill.place, saves=saves)
            os.kill(os.getpid(), signal.SIGKILL)

        self._thread = threading.Thread(target=die, daemon=True)
        self._thread.start()


def train(run: Run) -> None:
    """One rank of a run: resumes and trains to step `STEPS`. Rank 0 logs losses and what is durable."""
    folder = Path(run.folder)
    log = Log(folder)
    deadly = Deadly(run, log)
    deadly.reach("start", since=_begun)
    from support.plans import moe_plan

    import moec
    from moec.runtime.weights import homes

    moves, exchange = itertools.count(), homes.exchange_rows

    def exchange_rows(*arguments: Any) -> Any:
        deadly.reach("move", next(moves))
        return exchange(*arguments)

    homes.exchange_rows = exchange_rows
    data = Position()
    with moec.launch(moe_plan(gate=GATE, **PLANS[run.plan]), device="cpu", timeout=TIMEOUT) as job:
        deadly.reach("launched")
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        deadly.reach("resume")
        first = job.resume(folder, model, optimizer, data=data)
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if job.rank == 0:
            log(attempt=attempt, first=first)
        saves, saving = 0, None
        for number in range(STEPS - first):
            deadly.reach("step", number)
            tokens, labels = data.next(int(job.plan.spec.train.batch))
            loss = job.step(model, *(part.chunk(job.data_size)[job.data_rank] for part in (tokens, labels)))
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0:
                log(attempt=attempt, step=first + number + 1, loss=loss.item())
                if saving is not None and saving.done:
                    log(attempt=attempt, durable=int(saving.wait().name))
                    saving = None
            if (number + 1) % EVERY == 0:
                deadly.reach("save", saves)
                saves += 1
            saving = job.checkpoint(folder, model, optimizer, every=EVERY, keep=KEEP, data=data) or saving
        deadly.reach("leave")
    deadly.reach_the_end()


class Position:
    """A place in endless data."""

    def __init__(self) -> None:
        self._position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]

    def next(self, batch: int) -> tuple[Any, Any]:
        """The next tokens and labels, int64 `[batch, 8]`."""
        import torch

        self._position += 1
        generator = torch.Generator().manual_seed(self._position)
        tokens = torch.randint(32, (batch, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


if __name__ == "__main__":
    train(Run.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))

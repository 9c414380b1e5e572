"""What ranks write to stderr: shown as it comes, but a traceback only once, with the number of its rank."""

from __future__ import annotations

import codecs
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ANSI = re.compile(r"\x1b\[[0-9;]*m")
OF_RANK = re.compile(r"^\[rank\d+\]: ")
"""torch puts this before each line of an uncaught exception."""
TRACEBACK, VERDICT = "Traceback (most recent call last):", "error[MOE0705]"
"""A rank that begins to write one of these is about to end, and others write the same or what follows from it."""
DIAGNOSTIC = "error[MOE"
LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r(?=.))", re.DOTALL)
"""A line, or a state of a progress bar, which another follows in its place."""
PATIENCE_SECONDS = 30.0
"""A traceback of a rank that runs on after it is shown after this time."""
POLL_SECONDS = 0.05


@dataclass(slots=True)
class _Log:
    """One rank's file: how far it is read, the start of a line, and the lines held back since a time."""

    rank: int
    position: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    partial: str = ""
    held: list[str] = field(default_factory=list)
    since: float = 0.0

    @property
    def is_traceback(self) -> bool:
        return bool(self.held) and self.held[0].startswith(TRACEBACK)


class RankOutput:
    """Follows the files `…/attempt_N/RANK/stderr.log` below `folder` and writes what comes to `stream`."""

    def __init__(self, folder: Path, stream: TextIO) -> None:
        self._folder, self._stream = folder, stream
        self._earlier = {entry.name for entry in folder.iterdir()}
        """Runs whose logs were in the folder before."""
        self._logs: dict[Path, _Log] = {}
        self._attempt = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moec-output", daemon=True)
        self.explained = False
        """Whether a diagnostic or a traceback has been shown."""

    def start(self) -> None:
        """Begins to follow."""
        self._thread.start()

    def finish(self, failed: int | None, *, succeeded: bool = False) -> None:
        """Reads to the end, and shows why rank `failed` did; None: no traceback is shown.

        `succeeded`: what is held back is shown, as the script caught what it printed a traceback of.
        """
        self._ends.set()
        self._thread.join()
        self._poll()
        for log in self._logs.values():
            if log.partial:
                self._take(log, log.partial)
        if failed is not None:
            self._explain(failed)
        elif succeeded:
            for log in self._logs.values():
                self._write("".join(log.held))

    def logs(self) -> list[Path]:
        """Every rank's file of this run, those of a later start last."""
        found = [path for path in self._folder.glob("*/attempt_*/*/stderr.log") if path.parts[-4] not in self._earlier]
        return sorted(found, key=lambda path: (_attempt(path), path))

    def _run(self) -> None:
        while not self._ends.wait(POLL_SECONDS):
            self._poll()

    def _poll(self) -> None:
        for path in self.logs():
            attempt = _attempt(path)
            if attempt > self._attempt:  # torchrun has started all ranks again
                self._explain(None)
                self._write(f"the ranks are started again (restart {attempt})\n")
                self._attempt, self._logs, self.explained = attempt, {}, False
            if attempt == self._attempt:
                self._read(path, self._logs.setdefault(path, _Log(int(path.parts[-2]))))

    def _read(self, path: Path, log: _Log) -> None:
        with path.open("rb") as file:
            file.seek(log.position)
            data = file.read()
        log.position += len(data)
        text = log.partial + log.decoder.decode(data)
        end = 0
        for line in LINE.finditer(text):
            end = line.end()
            self._take(log, line[0])
        log.partial = text[end:]
        if log.held and time.monotonic() - log.since > PATIENCE_SECONDS:
            self._write("".join(log.held))
            log.held = []
        self._stream.flush()

    def _take(self, log: _Log, line: str) -> None:
        line = OF_RANK.sub("", line)
        plain = ANSI.sub("", line)
        if log.held:
            log.held.append(line)
        elif plain.startswith((TRACEBACK, VERDICT)):
            log.held, log.since = [line], time.monotonic()
        else:
            self.explained |= plain.startswith(DIAGNOSTIC)
            self._write(line)

    def _explain(self, failed: int | None) -> None:
        """Shows the traceback of rank `failed` or of the first that wrote one; without any, what moec said of it."""
        held = sorted((log for log in self._logs.values() if log.held), key=lambda log: log.since)
        raised = [log for log in held if log.is_traceback]
        chosen = next((log for log in raised if log.rank == failed), raised[0] if raised else None)
        if chosen is not None:
            same = sorted(log.rank for log in raised if log.held[-1] == chosen.held[-1])
            self._write(f"rank {chosen.rank} has raised an exception{_others(chosen.rank, same)}:\n")
        elif held:
            chosen = held[0]
        if chosen is not None:
            self._write("".join(chosen.held))
            self.explained = True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _attempt(path: Path) -> int:
    return int(path.parts[-3].removeprefix("attempt_"))


def _others(rank: int, same: list[int]) -> str:
    others = [str(other) for other in same if other != rank]
    if not others:
        return ""
    return f" (rank{'s' * (len(others) > 1)} {', '.join(others)} too)"

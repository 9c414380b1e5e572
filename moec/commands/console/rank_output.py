"""Shows the stderr of ranks at once, but of their tracebacks only one, at the end, with its rank's number."""

from __future__ import annotations

import codecs
import re
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from moec.commands.console.last_words import BEGINNING, MARK, TORCH_ERROR, Kind, LastWords, plain_text

LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r(?=.))", re.DOTALL)
"""A line, or a state of a progress bar, which the next state replaces."""
PATIENCE_SECONDS = 30.0
"""Seconds for which a traceback is held back while its rank runs on."""
POLL_SECONDS = 0.05


@dataclass(slots=True)
class _Log:
    """One rank's file: the position read so far, an unfinished line, and the lines held back since a time."""

    rank: int
    position: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    partial: str = ""
    words: LastWords = field(default_factory=LastWords)
    pending: list[str] = field(default_factory=list)
    since: float = 0.0
    start: int = 0
    """The index in `pending` where the newest traceback begins."""
    torch_errors: list[str] = field(default_factory=list)
    """Lines of torch's log held back since `torch_since`: another rank's exception may explain them."""
    torch_since: float = 0.0

    @property
    def is_verdict(self) -> bool:
        return bool(self.pending) and self.words.kind is Kind.VERDICT


class RankOutput:
    """Follows the files `RUN_…/attempt_N/RANK/stderr.log` below `folder` and writes new text to `stream`.

    `run`: the id that torchrun was given. Other runs may write into the same folder.
    """

    def __init__(self, folder: Path, run: str, stream: TextIO) -> None:
        self._folder, self._run_id, self._stream = folder, run, stream
        self._logs: dict[Path, _Log] = {}
        self._attempt = 0
        self._newest = ""
        """The newest line with text that was shown, without colours."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moec-output", daemon=True)

    def start(self) -> None:
        """Begins to follow."""
        self._thread.start()

    def finish(
        self, failed: int | None, status: int = 1, *, raised: Collection[int] = (), succeeded: bool = False
    ) -> bool:
        """Reads to the end, and shows why rank `failed` ended with `status`; returns whether any text explains it.

        `failed` None: no rank failed. Then the text that was held back is dropped, or shown if the job has `succeeded`:
        the script has caught the exception of that traceback. `raised`: the ranks that ended with status 1 themselves.
        """
        self._ends.set()
        self._thread.join()
        self._poll()
        self._take_partials()
        if failed is not None:
            explained = self._explain(failed, status, raised)
            if not explained:
                self._write("".join(line for log in self._logs.values() for line in log.torch_errors))
            return explained
        if succeeded:
            for log in self._logs.values():
                self._write("".join([*log.torch_errors, *log.pending]))
        return False

    def last_line(self, rank: int) -> str:
        """The last line with text that `rank` has written, for a message; empty if there is none."""
        return next((log.words.shown_line for log in self._logs.values() if log.rank == rank), "")

    def shows_last_line(self, rank: int) -> bool:
        """Whether the newest line on `stream` is the last one of `rank`."""
        return any(log.words.line == self._newest for log in self._logs.values() if log.rank == rank)

    def logs(self) -> list[Path]:
        """Every rank's file of this run, those of a later start last."""
        paths = self._folder.glob(f"{self._run_id}_*/attempt_*/*/stderr.log")
        return sorted(paths, key=lambda path: (_attempt(path), path))

    def _run(self) -> None:
        while not self._ends.wait(POLL_SECONDS):
            self._poll()

    def _poll(self) -> None:
        for path in self.logs():
            attempt = _attempt(path)
            if attempt > self._attempt:  # torchrun has started all ranks again
                self._take_partials()
                self._show_first_cause()
                self._write(f"the ranks are started again (restart {attempt})\n")
                self._attempt, self._logs = attempt, {}
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
        if log.pending and time.monotonic() - log.since > PATIENCE_SECONDS:
            self._write("".join(log.pending))
            log.pending = []
        if log.torch_errors and time.monotonic() - log.torch_since > PATIENCE_SECONDS:
            self._write("".join(log.torch_errors))
            log.torch_errors = []
        self._stream.flush()

    def _take_partials(self) -> None:
        for log in self._logs.values():
            if log.partial:
                self._take(log, log.partial)
                log.partial = ""

    def _take(self, log: _Log, line: str) -> None:
        """Takes a line. A traceback may begin behind a line without its end, such as a progress bar."""
        match = BEGINNING.search(line)
        prefix = line[: match.start()] if match else ""
        if MARK.sub("", prefix).strip("| +-"):  # else a traceback inside of an exception group
            self._add(log, prefix + "\n")
            line = line[len(prefix) :]
        self._add(log, line)

    def _add(self, log: _Log, line: str) -> None:
        mark = MARK.match(line)
        if mark:
            line = line[mark.end() :]
        begins = log.words.add(line, is_marked=mark is not None)
        if begins:
            log.start = len(log.pending)
        if log.pending:
            log.pending.append(line)
        elif begins:
            log.pending, log.since = [line], time.monotonic()
        elif TORCH_ERROR.match(line):
            log.torch_since = log.torch_since if log.torch_errors else time.monotonic()
            log.torch_errors.append(line)
        else:
            self._write(line)

    def _explain(self, failed: int, status: int, raised: Collection[int]) -> bool:
        """Shows why rank `failed` ended, if a rank has written it.

        Another status than 1 means that no other rank's end was the cause.
        """
        failed_log = next((log for log in self._logs.values() if log.rank == failed), _Log(failed))
        if status == 1:
            if failed_log.words.raises:
                self._show_exception(failed_log)
                return True
            if failed_log.words.diagnoses:
                self._write("".join(failed_log.pending))
                return True
            if self._show_first_cause(raised) or self._is_diagnosed_elsewhere(failed_log):
                return True
        else:
            self._show_verdict(failed_log)
        if failed_log.pending:
            self._write(f"rank {failed} wrote, before it ended:\n" + "".join(failed_log.pending))
        return False

    def _show_first_cause(self, raised: Collection[int] | None = None) -> bool:
        """Shows the first uncaught exception of any rank, or else MOE0705; returns whether there is one.

        `raised`: the ranks whose tracebacks without torch's mark count as uncaught; None: all ranks.
        """
        causes = [log for log in self._logs.values() if log.words.raises]
        if raised is not None:
            causes = [log for log in causes if log.words.is_marked or log.rank in raised]
        if causes:
            self._show_exception(min(causes, key=lambda log: log.words.since))
            return True
        return self._show_verdict()

    def _show_exception(self, chosen: _Log) -> None:
        """Shows what a rank wrote before the exception that ended it, then the exception."""
        raises = [log for log in self._logs.values() if log.words.raises]
        ranks = sorted(log.rank for log in raises if log.words.message == chosen.words.message)
        self._write("".join(chosen.pending[: chosen.start]))
        self._write(f"rank {chosen.rank} has raised an exception{_others(chosen.rank, ranks)}:\n")
        self._write("".join(chosen.pending[chosen.start :] or chosen.words.lines))

    def _show_verdict(self, excluded: _Log | None = None) -> bool:
        """Shows MOE0705 of the rank that has printed it first; returns whether there is one."""
        verdicts = [log for log in self._logs.values() if log.is_verdict and log is not excluded]
        if verdicts:
            self._write("".join(min(verdicts, key=lambda log: log.words.since).pending))
        return bool(verdicts)

    def _is_diagnosed_elsewhere(self, failed_log: _Log) -> bool:
        """Whether another rank's text ends with a diagnostic, and rank `failed` has written nothing since.

        Ranks that raise the same diagnostic leave it to rank 0 to print it.
        """
        diagnosed = [log.words for log in self._logs.values() if log.words.diagnoses]
        return any(words.since + POLL_SECONDS > failed_log.words.newest for words in diagnosed)

    def _write(self, text: str) -> None:
        self._newest = next((line for part in reversed(text.splitlines()) if (line := plain_text(part))), self._newest)
        self._stream.write(text)
        self._stream.flush()


def _attempt(path: Path) -> int:
    return int(path.parts[-3].removeprefix("attempt_"))


def _others(rank: int, ranks: list[int]) -> str:
    peers = [str(peer) for peer in ranks if peer != rank]
    if not peers:
        return ""
    return f" (rank{'s' * (len(peers) > 1)} {', '.join(peers)} too)"

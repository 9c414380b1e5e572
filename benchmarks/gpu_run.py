"""Runs measurements in processes of their own, each within a time limit, and keeps what was measured.

A process that dies or hangs costs the measurement it had begun, and a new one goes on behind that. When the time of
the whole is up, the measurement under way is left out, not failed: the next start begins with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from gpu_rows import Measurement, RowFile

START = 120.0
"""Seconds that a process may take until it begins: imports, and the device's context."""

LEAST = 5.0
"""Seconds that must be left to begin a group."""

MOST_DEATHS = 3
"""Processes that may die one after the other, without a result between them, before a group is given up."""

MOST_OUTPUT = 200_000
"""Bytes of a process' output that are kept, beside the rows in a file that ends in `.log`."""

Say = Callable[[str], None]


class Silent(Exception):  # noqa: N818 - a reason, not an error
    """The process said nothing within the limit, or ended."""


class Child:
    """A process of `gpu_child.py`. It imports `modules`, then waits for `go`."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        script = str(Path(__file__).parent / "gpu_child.py")
        self._process = subprocess.Popen(
            [sys.executable, script, str(theirs), str(os.getpid()), *modules],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)
        self._pipe, self._said, self._printed = ours, b"", 0

    def go(self, device: str, measurements: Sequence[Measurement]) -> None:
        of = [{"key": one.key, "function": one.function, "arguments": dict(one.arguments)} for one in measurements]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"device": device, "measurements": of}).encode() + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died while it started: `hear` tells why

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None when the process has ended well. Raises `Silent`."""
        until = time.monotonic() + seconds
        while b"\n" not in self._said:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                raise Silent(f"no answer within {seconds:.0f} s")
            read = os.read(self._pipe, 65536)
            if not read:
                code = self._process.wait()
                if code == 0 and not self._said:
                    return None
                raise Silent(self._end_of(code))
            self._said += read
        line, _, self._said = self._said.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        self._printed = message.pop("printed", self._printed)
        return message

    def _end_of(self, code: int) -> str:
        """How the process ended, with the last line that it printed since it began to measure."""
        self._log.seek(self._printed)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        return f"{how}: {lines[-1].strip()[:300]}" if lines else how

    def end(self) -> bytes:
        """Kills the process and what it started, if it still runs. Returns the end of its output."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - MOST_OUTPUT))
        said = self._log.read()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._pipe)
        self._log.close()
        return said


@dataclass(slots=True)
class Run:
    """`modules`: what a process imports before it is asked to measure. `until`: on `time.monotonic`'s clock."""

    file: RowFile
    device: str
    until: float
    modules: Sequence[str] = ()
    say: Say = print
    _ready: Child | None = field(default=None, init=False)

    def run(self, measurements: Sequence[Measurement], *, again: bool = False) -> list[Measurement]:
        """Measures what has no row yet, in this order. Returns what was left out for want of time."""
        groups = [list(of) for _, of in groupby(self.file.missing(measurements, self.device, again=again), _group)]
        left: list[Measurement] = []
        try:
            for number, group in enumerate(groups):
                left += self._group(group, more=number + 1 < len(groups)) if self._time() > LEAST else group
        finally:
            if self._ready is not None:
                self._ready.end()
        return left

    def _time(self) -> float:
        return self.until - time.monotonic()

    def _group(self, left: list[Measurement], *, more: bool) -> list[Measurement]:
        """Measures a group, in as many processes as it takes. Returns what was left out."""
        deaths = 0
        while left and deaths < MOST_DEATHS and self._time() > LEAST:
            child, self._ready = self._ready or Child(self.modules), None
            child.go(self.device, left)
            first = left[0]
            if more:
                self._ready = Child(self.modules)
            try:
                before = len(left)
                failed = self._listen(child, left)
                deaths = deaths + 1 if before - len(left) == failed else int(failed)
            except TimeoutError:
                return left
            finally:
                self._keep(first.key, child.end())
        for one in left if deaths == MOST_DEATHS else ():
            self._write(one, failed=f"not begun: {deaths} processes before it died")
        return left if deaths < MOST_DEATHS else []

    def _listen(self, child: Child, left: list[Measurement]) -> bool:
        """Writes a row for each message and takes its measurement from `left`. Whether the process died or hung.

        Raises `TimeoutError` when the time of the whole is up.
        """
        limit = START
        while left:
            try:
                message = child.hear(min(limit, max(0.0, self._time())))
            except Silent as reason:
                if self._time() <= 0:
                    raise TimeoutError from None
                self._write(left.pop(0), failed=str(reason))
                return True
            if message is None:
                return False  # the device refuses that process: the next one goes on
            limit = START
            if "begin" in message:
                limit = left[0].limit
            else:
                self._write(left.pop(0), **message)
        return False

    def _keep(self, key: str, said: bytes) -> None:
        """Appends a process' output to the log; `key` is of its first measurement."""
        if said.strip():
            with self.file.path.with_suffix(".log").open("ab") as log:
                log.write(f"== {key} and what followed\n".encode() + said + b"\n")

    def _write(self, one: Measurement, **found: Any) -> None:
        results = found.pop("result", {})
        row = {**one.arguments, **results, **found, "key": one.key, "on": self.device, "at": round(time.time(), 1)}
        self.file.append(row)
        self.say(f"{one.key}: {found.get('failed') or short(results)}")


def _group(one: Measurement) -> str:
    return one.group


def short(result: dict[str, Any]) -> str:
    """A result as one line of numbers."""
    said = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in result.items())
    return ", ".join(said)[:200]

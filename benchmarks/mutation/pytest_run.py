"""One process of pytest in a copy, watched: what happened to each test, and whether one hung."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation.copied_tree import environment

COLLECTION_SECONDS = 150.0
"""How long pytest gets to import and collect."""
POLL_SECONDS = 0.2


def arguments_for(marks: str) -> list[str]:
    """The options of pytest that select tests by marks, `slow` or `not slow`: slow ones run with many examples."""
    return ["-m", marks] if marks == "not slow" else ["--everything", "-m", marks]


@dataclass(slots=True)
class Run:
    """`status` is `passed`, `failed`, `hung` or `unfinished`; `test` the one that failed or hung.

    A test that cannot be collected counts as failed, and a process that dies during a test as that test's failure.
    `slow`: every test that was collected, and whether it is slow.
    """

    status: str = "passed"
    test: str = ""
    seconds: float = 0.0
    output: str = ""
    slow: dict[str, bool] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)


def run_pytest(
    copy: Path,
    arguments: Sequence[str],
    *,
    tests: Sequence[str] | None = None,
    limits: Mapping[str, float] | None = None,
    limit: float = 600.0,
    seconds: float | None = None,
    memory: int = 12,
    **variables: str,
) -> Run:
    """Runs pytest with `arguments`, only `tests` in their order if given, and kills its process group at the end.

    A test hangs after its number of seconds in `limits`, or `limit`. After `seconds` in all no other test begins, and
    the run is `unfinished`. `memory`: most GiB of each process.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moec-mutants-") as name:
        folder = Path(name)
        events, output = folder / "events", folder / "output"
        given = {"MOEC_MUTANTS_EVENTS": str(events), "TMPDIR": name}
        if tests is not None:
            (folder / "tests").write_text(json.dumps(list(tests)))
            given["MOEC_MUTANTS_TESTS"] = str(folder / "tests")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants_plugin", *arguments]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=copy,
                env=environment(copy, **given, **variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory << 30, memory << 30)),
            )
        try:
            stopped = _watch(process, events, limits or {}, limit, seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        run = _read(events, process.returncode, stopped)
        run.output = output.read_text(errors="replace")[-3000:]
    run.seconds = time.monotonic() - begun
    return run


def _watch(
    process: subprocess.Popen[bytes],
    events: Path,
    limits: Mapping[str, float],
    limit: float,
    seconds: float | None,
) -> str | None:
    """Waits for pytest's end; `hung` or `unfinished` where it is to be stopped before."""
    begun = time.monotonic()
    last_allowed: str | None = None  # the test that ran when the time was over
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        now, last = time.monotonic(), _last(events)
        since = now - last.get("at", begun)
        allowed = limits.get(last["started"], limit) if "started" in last else max(limit, COLLECTION_SECONDS)
        if since > allowed:
            return "hung"
        if seconds is not None and now - begun > seconds:
            last_allowed = last_allowed or last.get("started")
            if last_allowed is None or last["started"] != last_allowed:
                return "unfinished"
    return None


def _last(events: Path) -> dict[str, Any]:
    """The last event that began something: a test, or the running of tests."""
    for line in reversed(_lines(events)):
        event: dict[str, Any] = json.loads(line)
        if "started" in event or "collected" in event:
            return event
    return {}


def _lines(events: Path) -> list[str]:
    text = events.read_text() if events.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _read(events: Path, code: int, stopped: str | None) -> Run:
    run = Run(status=stopped or "passed")
    broken, running = "", ""
    for event in map(json.loads, _lines(events)):
        if "collected" in event:
            run.slow = dict(event["collected"])
        elif "broken" in event:
            broken = broken or event["broken"] or "conftest"
        elif "started" in event:
            running = event["started"]
        else:
            test, outcome = event["test"], event["outcome"]
            run.durations[test] = run.durations.get(test, 0.0) + event["seconds"]
            if run.outcomes.get(test) != "failed" and (event["phase"] == "call" or outcome != "passed"):
                run.outcomes[test] = outcome
                if outcome == "failed" and not run.test:
                    run.test = test
    if run.test and stopped != "hung":
        run.status = "failed"
    elif stopped == "hung":
        run.test = running or "collection"
    elif stopped is None and code not in (0, 5):
        run.status, run.test = "failed", broken or running or "collection"
    return run

"""`benchmarks/gpu_run.py`: what was measured stands, whoever dies. Its processes are real, its measurements planted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_rows import Measurement, RowFile
from gpu_run import MOST_DEATHS, Run

TESTS = Path(__file__).parents[2]
BENCHMARKS = TESTS.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (BENCHMARKS, TESTS))))


def planted(key: str, limit: float = 600.0, group: str = "one", **arguments: Any) -> Measurement:
    """A measurement by the function that its key begins with."""
    return Measurement(key, group, f"support.measurements:{key.partition(' ')[0]}", arguments, limit)


def run(file: Path, *measurements: Measurement, up_after: str = "none", again: bool = False) -> list[str]:
    """Keys that were left out. Time is up half a second after the measurement `up_after`."""

    def say(line: str) -> None:
        if line.startswith(f"{up_after}:"):
            running.until = time.monotonic() + 0.5

    running = Run(RowFile(file), "cpu", time.monotonic() + 600, say=say)
    return [one.key for one in running.run(measurements, again=again)]


def rows(file: Path) -> dict[str, Any]:
    """What failed by its reason, else the whole row."""
    return {row["key"]: row.get("failed", row) for row in RowFile(file).rows()}


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ends before, or while, the file is read
        return False


def test_a_process_that_dies_or_fails_costs_one_measurement_and_the_others_stand(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    names = ("works 1", "dies", "works 2", "raises", "works 3", "exits", "works 4")
    assert run(file, *map(planted, names)) == []
    found = rows(file)
    assert list(found) == list(names)
    assert found["dies"] == "killed by SIGKILL: an illegal memory access"
    assert found["raises"] == "ValueError: a wrong number"
    assert found["exits"] == "its process ended with 7"
    processes = [found[f"works {number}"]["process"] for number in range(1, 5)]
    assert processes[1] == processes[2]  # an exception ends no process
    assert len(set(processes)) == 3


def test_a_measurement_that_hangs_costs_its_limit_and_what_it_started_ends(tmp_path: Path) -> None:
    file, note = tmp_path / "rows.jsonl", tmp_path / "note"
    started = time.monotonic()
    assert run(file, planted("hangs", limit=2.0, note=str(note)), planted("works")) == []
    assert time.monotonic() - started < 500
    assert rows(file)["hangs"] == "no answer within 2 s"
    assert rows(file)["works"]["value"] == 1.0
    wait_until(lambda: not is_alive(int(note.read_text())))


def test_a_group_whose_processes_all_die_is_given_up_and_the_next_one_runs(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    dying = [planted(f"dies {number}") for number in range(MOST_DEATHS + 2)]
    assert run(file, *dying, planted("works", group="two")) == []
    found = rows(file)
    assert found["works"]["value"] == 1.0
    assert [found[one.key].startswith("not begun") for one in dying] == [False] * MOST_DEATHS + [True] * 2


def test_when_time_is_up_the_rest_is_left_out_and_the_next_start_begins_there(tmp_path: Path) -> None:
    file, signal_file = tmp_path / "rows.jsonl", tmp_path / "go"
    given = (planted("works 1"), planted("waits", path=str(signal_file)), planted("works 2", group="two"))
    assert run(file, *given, up_after="works 1") == ["waits", "works 2"]
    assert list(rows(file)) == ["works 1"]
    signal_file.touch()
    assert run(file, *given) == []
    assert list(rows(file)) == ["works 1", "waits", "works 2"]
    assert lines(file) == 3  # nothing was measured twice


def test_failures_are_measured_again_on_request_only(tmp_path: Path) -> None:
    file, signal_file = tmp_path / "rows.jsonl", tmp_path / "go"
    waiting = planted("waits", limit=1.0, path=str(signal_file))
    run(file, planted("works"), waiting)
    signal_file.touch()
    run(file, planted("works"), waiting)
    assert rows(file)["waits"] == "no answer within 1 s"
    run(file, planted("works"), waiting, again=True)
    assert rows(file)["waits"]["value"] == 2.0
    assert lines(file) == 3


def test_a_line_that_was_cut_short_is_no_row_and_the_next_row_stands(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    file.append({"key": "first", "on": "cpu"})
    with file.path.open("ab") as cut:
        cut.write(b'{"key": "second", "o')
    file.append({"key": "third", "on": "cpu"})
    assert [row["key"] for row in file.rows()] == ["first", "third"]
    measurements = [Measurement(key, "one", "") for key in ("first", "second", "third")]
    assert [one.key for one in file.missing(measurements, "cpu", again=False)] == ["second"]
    assert len(file.missing(measurements, "cuda", again=False)) == 3  # another device's rows are not its own


PROGRAM = """
import sys, time, json
from pathlib import Path
from gpu_rows import Measurement, RowFile
from gpu_run import Run
given = [Measurement(**one) for one in json.loads(sys.argv[2])]
Run(RowFile(Path(sys.argv[1])), "cpu", time.monotonic() + 600).run(given)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child outlives its parent")
def test_when_the_parent_is_killed_all_die_and_the_next_start_goes_on(tmp_path: Path) -> None:
    file, note = tmp_path / "rows.jsonl", tmp_path / "note"
    given = [planted("works 1"), planted("works 2"), planted("hangs", note=str(note)), planted("works 3", group="two")]
    of = [
        {"key": one.key, "group": one.group, "function": one.function, "arguments": dict(one.arguments)}
        for one in given
    ]
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM, str(file), json.dumps(of)], stdout=subprocess.DEVNULL)
    wait_until(lambda: note.exists() and lines(file) == 2)  # the child hangs while the parent may still write
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert list(rows(file)) == ["works 1", "works 2"]
    wait_until(lambda: not is_alive(int(note.read_text())))
    before = rows(file)
    assert run(file, *(one if one.key != "hangs" else planted("raises") for one in given)) == []
    assert {key: rows(file)[key] for key in before} == before
    assert lines(file) == 4

"""The session's plugin, and `make test-all`: what is left behind is found, what passed is not run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import parts
import pytest
from support.session.seconds import LONGER, folder_of, table, too_long
from support.session.sharing import RANKS, unit_of

LEAVING = """
import multiprocessing, os, subprocess, sys, threading, time
import pytest

WAIT = "import time; time.sleep(60)"

def test_process(): subprocess.Popen([sys.executable, "-c", WAIT])
def test_orphan(): subprocess.run(["sh", "-c", f"'{sys.executable}' -c '{WAIT}' &"])
def forked(): os.fork() or time.sleep(60)

def test_forked_orphan():
    process = multiprocessing.get_context("forkserver").Process(target=forked)
    process.start(); process.join()

def test_thread(): threading.Thread(target=time.sleep, args=(60,), name="left", daemon=True).start()
def test_file(): open("left.txt", "w").close()
def test_variable(): os.environ["LEFT"] = "1"
def test_folder(): os.chdir("/")
def test_variable_is_restored(): assert "LEFT" not in os.environ
def test_nothing(): subprocess.run([sys.executable, "-c", "pass"]); open("ignored.log", "w").close()

@pytest.fixture(scope="module")
def running():
    process = subprocess.Popen([sys.executable, "-c", WAIT])
    yield
    process.kill(); process.wait()

def test_process_of_a_module(running): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.repeated
def test_repeated(): pass

@pytest.fixture(scope="module")
def left_running():
    subprocess.Popen([sys.executable, "-c", WAIT])

def test_process_of_a_file(left_running): pass
"""

LEFT = {
    "process": "process ",
    "orphan": "process ",
    "forked_orphan": "process ",
    "thread": "thread left",
    "file": "left.txt",
    "variable": "variable LEFT: '1', was None",
    "folder": "the working folder: '/', was",
    "process_of_a_file": "its file leaves behind:\nprocess ",
}


def run(folder: Path, *arguments: str) -> str:
    """What pytest with the plugin prints of LEAVING, in a checkout of its own."""
    (folder / "test_leaving.py").write_text(LEAVING)
    (folder / ".gitignore").write_text("*.log\n__pycache__/\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    repeated\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.session.plugin", "-p", "no:cacheprovider"]
    command += ["--grace=0.5", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_test_that_leaves_something_behind_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    printed = run(tmp_path, "--counts", "counts.log", "--override-ini", "xfail_strict=true")
    assert json.loads((tmp_path / "counts.log").read_text()) == {"passed": 12, "failed": 8, "skipped": 0}
    for name, what in LEFT.items():
        (section,) = [each for each in printed.split("\n____") if f"of test_{name} _" in each.partition("\n")[0]]
        assert "leaves behind:" in section
        assert what in section
    assert "1 deselected" in printed


def test_a_run_of_everything_has_slow_tests_and_repetitions(tmp_path: Path) -> None:
    printed = run(tmp_path, "--everything", "-k", "slow or repeated")
    assert "21 passed" in printed


def test_files_of_the_pool_stay_together_and_others_whole() -> None:
    assert {unit_of(f"tests/distributed/{test}") for test in ("test_zero.py::test_a[1]", "test_jobs.py::test")} == {
        RANKS
    }
    for file in ("tests/unit/test_readme.py", "tests/distributed/test_launch_run.py"):
        assert unit_of(f"{file}::test_a[x::y]") == file


def test_the_table_adds_up_folders_and_names_the_slowest() -> None:
    taken = {f"tests/unit/cli/test_{number}.py::test": float(number) for number in range(12)}
    lines = list(table({**taken, "tests/test_root.py::test": 0.5}, 70.0))
    assert lines[1].split() == ["66.0", "12", "unit/cli"]
    assert "66.5     13  all, in 70 s" in lines[3]
    assert [line.split("test_")[1] for line in lines[5:15]] == [f"{number}.py::test" for number in range(11, 1, -1)]
    assert len(too_long(taken)) == 6
    assert folder_of("tests/property/test_plans.py::test") == "property"


def test_a_part_that_passed_on_these_files_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RESULTS", tmp_path / "results.json")
    assert parts.passed_before("ranks", "aa") is None
    result = {"passed": 3, "failed": 0, "skipped": 0, "seconds": 9, "date": "2026-11-26", "files": "aa"}
    parts.store("ranks", result)
    parts.store("jobs", {**result, "failed": 1})
    assert parts.passed_before("ranks", "aa") == result
    assert parts.passed_before("ranks", "bb") is None
    assert parts.passed_before("jobs", "aa") is None


def test_any_changed_file_but_the_results_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "RESULTS", tmp_path / "results.json")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a.py").write_text("1")
    one = parts.digest()
    (tmp_path / "results.json").write_text("{}")
    assert parts.digest() == one
    (tmp_path / "a.py").write_text("2")
    assert parts.digest() != one


def test_every_folder_of_a_part_exists_and_none_is_in_two() -> None:
    folders = [folder for listed in parts.PARTS.values() for folder in listed]
    assert len(folders) == len(set(folders))
    assert all((parts.ROOT / folder).is_dir() for folder in folders)


def test_few_tests_may_take_longer_each_with_a_reason_and_they_exist() -> None:
    assert len(LONGER) <= 10
    assert all(LONGER.values())
    for test in LONGER:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (parts.ROOT / file).read_text(encoding="utf-8"), test

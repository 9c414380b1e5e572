"""Runs tests once, a few files in each process, and records which lines each covers."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from mutation.copied_tree import require_own_import
from mutation.coverage_database import CoverageDatabase
from mutation.drawing import ROOMS
from mutation.pytest_run import Run, arguments_for, run_pytest

FILES = 8
"""Test files of one process: coverage is stored after each, so that a recording goes on from there."""
HANGS = 1800.0
"""Seconds after which a test under coverage counts as hung."""

CONFIGURATION = """[run]
parallel = true
data_file = {folder}/coverage
source =
{rooms}
context = ${{PYTEST_CURRENT_TEST-import}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured, dynamic-conflict, already-imported
patch = _exit, fork
"""
"""Workers of the gloo pool are forked, and end by `os._exit`."""


def test_files(tree: Path, paths: Sequence[str]) -> list[str]:
    """The test files under these paths, relative to `tree`. Raises `FileNotFoundError` for a path that is not there."""
    found: set[str] = set()
    for path in paths or ["tests"]:
        if not (tree / path).exists():
            raise FileNotFoundError(f"no {path} in {tree}")
        files = (tree / path).rglob("test_*.py") if (tree / path).is_dir() else [tree / path]
        found |= {file.relative_to(tree).as_posix() for file in files}
    return sorted(found)


def record(tree: Path, database: CoverageDatabase, paths: Sequence[str], marks: str, *, again: bool = False) -> None:
    """Records the tests with these marks; files that are recorded already are left out unless `again`."""
    require_own_import(tree)
    digests = {file: sha256((tree / file).read_bytes()).hexdigest() for file in test_files(tree, paths)}
    left = [file for file, digest in digests.items() if again or not database.is_recorded(file, digest, marks)]
    print(f"{len(left)} of {len(digests)} test files to record, {marks}", flush=True)
    done = 0
    for files in _groups(left):
        folder = Path(tempfile.mkdtemp(prefix="moec-coverage-"))
        try:
            tests, run = _record_some(tree, folder, files, marks)
            database.add(tree, folder, tests, [(file, digests[file], marks) for file in files])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        done += len(files)
        failed = sum(outcome == "failed" for _, outcome, _ in tests.values())
        counts = f"{len(tests)} tests, {failed} failed, {run.seconds:.0f} s"
        print(f"{done}/{len(left)} {files[0]}{' …' if len(files) > 1 else ''}: {counts}", flush=True)


def _groups(files: Sequence[str]) -> Iterator[list[str]]:
    for _, of in groupby(files, key=lambda file: file.rpartition("/")[0]):
        names = list(of)
        yield from (names[i : i + FILES] for i in range(0, len(names), FILES))


def _record_some(
    tree: Path, folder: Path, files: list[str], marks: str
) -> tuple[dict[str, tuple[bool, str, float]], Run]:
    """Whether each test is slow, its outcome and seconds; and the run. A test that fails only under coverage passes."""
    rooms = "\n".join(f"    {tree.resolve() / room}" for room in ROOMS)
    configuration = folder / "configuration"
    configuration.write_text(CONFIGURATION.format(folder=folder, rooms=rooms))
    variables = {"COVERAGE_PROCESS_START": str(configuration), "MOEC_MUTANTS_RECORDING": str(folder)}
    run = run_pytest(tree, [*arguments_for(marks), *files], limit=HANGS, memory=16, **variables)
    if run.status == "failed" and not run.outcomes:
        sys.exit(f"{' '.join(files)}: not collected\n{run.output}")
    if run.status == "hung":
        print(f"{' '.join(files)}: hung at {run.test}\n{run.output}", file=sys.stderr)
    failed = [test for test, outcome in run.outcomes.items() if outcome == "failed"]
    if failed:
        again = [*arguments_for(marks), *sorted({test.split("::")[0] for test in failed})]
        without = run_pytest(tree, again, tests=failed, limit=HANGS, memory=16)
        run.outcomes |= {test: outcome for test, outcome in without.outcomes.items() if outcome == "passed"}
    return {test: (run.slow.get(test, False), o, run.durations[test]) for test, o in run.outcomes.items()}, run

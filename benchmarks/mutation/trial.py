"""Tries one mutant: the tests that cover it, in chunks, until one fails, hangs, or the time is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutation.copied_tree import mutated_file
from mutation.coverage_database import Test
from mutation.mutant import Mutant
from mutation.pytest_run import Run, arguments_for, run_pytest
from mutation.selection import Selection

CHUNKS = (25, 100, 400)
"""Tests of the first process, of the second, and of each after: most mutants are killed by the first few tests."""
LONG_SECONDS = 30.0
HANG_FACTOR, HANG_SECONDS = 3.0, 60.0
"""A test hangs after so many times its recorded time and so many seconds more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant.

    `result`: `make test` (a test of it kills the mutant), `rest` (only another one does), `survived`, `not covered`.
    `how`: `failed` or `timeout`. `tests`: how many tests ran, of `of` selected ones. `seconds`: of both parts.
    """

    result: str
    by: str = ""
    how: str = ""
    tests: int = 0
    of: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class Trials:
    """`tree` and `mutated`: the copies. `seconds`: for the tests of `make test`, and for the rest. `flaky` grows."""

    tree: Path
    mutated: Path
    seconds: tuple[float, float] = (300.0, 300.0)
    flaky: set[str] = field(default_factory=set)
    green: set[str] = field(default_factory=set)
    """Long tests that passed on the source in this run: they are not run there again for each mutant."""

    def run(self, mutant: Mutant, selection: Selection) -> Outcome:
        """Tries the mutant. A test that fails on the source too is left out, and the others go on."""
        total = len(selection.first) + len(selection.rest) + len(selection.beside)
        if not total:
            return Outcome("not covered")
        with mutated_file(self.mutated, mutant):
            begun = time.monotonic()
            killer, how, ran = self._try(selection.first, self.seconds[0])
            first = time.monotonic() - begun
            second, more = 0.0, 0
            if killer is None:
                begun = time.monotonic()
                for tests in selection.rest, selection.first[ran:], selection.beside:
                    left = self.seconds[1] - (time.monotonic() - begun)
                    killer, how, number = self._try(tests, left)
                    more += number
                    if killer is not None:
                        break
                second = time.monotonic() - begun
        times = (round(first, 1), round(second, 1))
        if killer is None:
            return Outcome("survived", tests=ran + more, of=total, seconds=times)
        result = "rest" if killer.slow else "make test"
        return Outcome(result, killer.name, how, ran + more, total, times)

    def _try(self, tests: Sequence[Test], seconds: float) -> tuple[Test | None, str, int]:
        """The test that kills, and how; how many of `tests` are done."""
        deadline = time.monotonic() + seconds
        done = 0
        for chunk in _chunks(tests):
            left = [test for test in chunk if test.name not in self.flaky]
            while left:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None, "", done
                run = run_tests(self.mutated, left, remaining)
                if run.status == "unfinished":
                    return None, "", done + len(run.outcomes)
                if run.status == "passed":
                    break
                killer = _killer(run, left)
                # Only what the mutant changes counts: on the source the same test must pass, and here fail once more.
                if self._passes(killer) and run_tests(self.mutated, [killer]).status != "passed":
                    return killer, "timeout" if run.status == "hung" else "failed", done + len(run.outcomes)
                print(f"  fails on the source too, or not alone: {killer.name}", file=sys.stderr, flush=True)
                self.flaky.add(killer.name)
                left = [test for test in left if test.name not in self.flaky and test.name not in run.outcomes]
            done += len(chunk)
        return None, "", done

    def _passes(self, test: Test) -> bool:
        """Whether a test passes on the source."""
        if test.name not in self.green and run_tests(self.tree, [test]).status != "passed":
            return False
        if test.seconds > LONG_SECONDS:
            self.green.add(test.name)
        return True


def run_tests(copy: Path, tests: Sequence[Test], seconds: float | None = None) -> Run:
    """These tests, all slow or none, in their order, up to the first that fails or hangs; none begins after `seconds`.

    A pytest that a test starts stops at its first failure too: Triton's interpreter runs for minutes in one test.
    """
    files = list(dict.fromkeys(test.file for test in tests))
    limits = {test.name: _limit(test) for test in tests}
    return run_pytest(
        copy,
        ["-x", *arguments_for("slow" if tests[0].slow else "not slow"), *files],
        tests=[test.name for test in tests],
        limits=limits,
        seconds=seconds,
        PYTEST_ADDOPTS="-x",
    )


def _limit(test: Test) -> float:
    return HANG_FACTOR * test.seconds + HANG_SECONDS


def _killer(run: Run, tests: Sequence[Test]) -> Test:
    """The test that failed or hung. Where a file cannot be collected any more, the first of that file."""
    named = {test.name: test for test in tests}
    return named.get(run.test) or next((test for test in tests if test.file == run.test.split("::")[0]), tests[0])


def _chunks(tests: Sequence[Test]) -> Iterator[Sequence[Test]]:
    begin, number = 0, 0
    while begin < len(tests):
        size = CHUNKS[min(number, len(CHUNKS) - 1)]
        yield tests[begin : begin + size]
        begin, number = begin + size, number + 1

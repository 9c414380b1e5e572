"""The table at the end of `make test`: seconds of each folder, and the slowest tests."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import pytest
from support.session import extent

MOST_SECONDS = 5.0
"""A test of `make test` takes no longer on two quiet cores, but for those in `LONGER`."""

LONGER = {
    "tests/kernels/test_interpreted.py::test_rendered_kernels_agree_with_plain_torch_in_the_interpreter": (
        "248 tests in a process of its own: the interpreter has to be on before Triton is imported"
    ),
    "tests/distributed/test_readme_script.py::test_the_training_script_learns": (
        "the README's script, as torchrun runs it"
    ),
    "tests/distributed/test_training.py::test_compiled_graphs_with_their_collectives_train_alike"
    "[tp 2, ep 2 and 1, zero 3, capacity]": "Dynamo starts and compiles in two processes",
    "tests/distributed/test_homes_ranks.py::test_training_with_homes_that_move_is_that_of_homes_that_stay"
    "[adamw, ep 2, zero 1]": "five jobs of four ranks, and a checkpoint of each kind",
    "tests/distributed/test_random_kills.py::test_a_run_goes_on_by_itself_after_a_kill_while_it_saves": (
        "a kill and two starts of a job under torchrun"
    ),
    "tests/distributed/test_resume_example.py"
    "::test_a_killed_run_restarts_by_itself_and_has_the_losses_of_one_that_was_not": (
        "a kill and two starts of a job under torchrun"
    ),
    "tests/distributed/test_twenty_steps.py"
    "::test_twenty_steps_under_any_degrees_are_those_of_the_unsharded_model"
    "[ranks 4, tp 1, ep 4, zero 3, recompute experts, microbatches 4, eight steps]": "eight steps of four ranks",
    "tests/distributed/test_peers.py::test_a_slow_rank_is_waited_for_and_a_silent_one_is_not": (
        "a rank sleeps for longer than the timeout of its job, which a busy machine must not reach by itself"
    ),
}
"""At most ten tests that take longer than `MOST_SECONDS`, and why."""

SLOWEST = 10


class Seconds:
    """A plugin of pytest that adds up what each test took, its setup and teardown included.

    It writes how many passed, failed and were skipped to the file `counts`, where there is one.
    """

    def __init__(self, counts: str | None) -> None:
        self._begun = time.monotonic()
        self._counts = counts
        self._taken: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._counts:
            found = {
                name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "skipped", "error")
            }
            found["failed"] += found.pop("error")
            Path(self._counts).write_text(json.dumps(found), encoding="utf-8")
        if len(self._taken) > SLOWEST:
            for line in table(self._taken, time.monotonic() - self._begun):
                terminalreporter.write_line(line)
        if (longer := too_long(self._taken)) and not extent.everything:
            terminalreporter.write_line(
                f"over {MOST_SECONDS:g} s, on two quiet cores only those of `LONGER` in {Path(__file__).name} may: "
                f"{', '.join(longer)}"
            )


def folder_of(test: str) -> str:
    """The folder of a test, at most two levels deep: `unit/cli`."""
    return "/".join(PurePosixPath(test.partition("::")[0]).parent.parts[1:3]) or "tests"


def table(taken: Mapping[str, float], whole: float) -> Iterable[str]:
    """The lines of the table: `taken` has the seconds of each test, `whole` is those of the run."""
    seconds, number = Counter[str](), Counter[str]()
    for test, each in taken.items():
        seconds[folder_of(test)] += each
        number[folder_of(test)] += 1
    yield f"{'seconds':>9} {'tests':>6}  folder"
    for folder, each in seconds.most_common():
        yield f"{each:9.1f} {number[folder]:6}  {folder}"
    yield f"{sum(taken.values()):9.1f} {len(taken):6}  all, in {whole:.0f} s"
    yield f"\n{'seconds':>9}  the {SLOWEST} slowest tests"
    for test in sorted(taken, key=taken.__getitem__, reverse=True)[:SLOWEST]:
        yield f"{taken[test]:9.1f}  {test}"


def too_long(taken: Mapping[str, float]) -> list[str]:
    """The tests that took longer than one of `make test` may."""
    return [test for test, each in taken.items() if each > MOST_SECONDS and test not in LONGER]

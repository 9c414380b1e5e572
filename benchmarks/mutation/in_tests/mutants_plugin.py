"""A plugin of pytest: runs the tests of a list in its order, and writes what happens to them as it happens.

`MOEC_MUTANTS_TESTS` names a JSON list of node ids; without it all collected tests run. `MOEC_MUTANTS_EVENTS` names
the file of events, one JSON object a line. Ids that are not collected are left out: a mutant may change a test's
parameters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

EVENTS = os.environ["MOEC_MUTANTS_EVENTS"]
TESTS = os.environ.get("MOEC_MUTANTS_TESTS")
# Only this process's: a test that starts pytest itself has its own.
for name in ("MOEC_MUTANTS_EVENTS", "MOEC_MUTANTS_TESTS"):
    os.environ.pop(name, None)


def _write(**event: Any) -> None:
    with open(EVENTS, "a") as file:
        file.write(json.dumps(event | {"at": time.monotonic()}) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if TESTS:
        order = {test: number for number, test in enumerate(json.loads(Path(TESTS).read_text()))}
        left_out = [item for item in items if item.nodeid not in order]
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    tests = [[item.nodeid, item.get_closest_marker("slow") is not None] for item in session.items]
    _write(collected=tests)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(broken=report.nodeid)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(started=nodeid)
    _forget_kernels()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _write(test=report.nodeid, phase=report.when, outcome=report.outcome, seconds=report.duration)


def _forget_kernels() -> None:
    """While tests are recorded: each renders its kernels again, so that it opens their templates."""
    if "COVERAGE_PROCESS_START" in os.environ and (module := sys.modules.get("moec.codegen.kernels.kernel_shape")):
        module.render.cache_clear()
        module._environment.cache_clear()

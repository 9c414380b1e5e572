"""Options of all tests, how they are shared among processes, and what each of them may leave behind: nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.session import extent
from support.session.leftovers import adopt, left_since, snapshot
from support.session.seconds import Seconds
from support.session.sharing import scheduler

# Before torch is imported: threads cost more than they save on such small models, and gloo's workers need the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What the command line prints depends on the terminal, and xdist sets one of 80 columns.
for terminal in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(terminal, None)
# FX graphs are millions of small objects: with Python's thresholds garbage collection takes a fifth of the time.
gc.set_threshold(50_000, 20, 50)


def pytest_configure(config: pytest.Config) -> None:
    extent.everything = config.getoption("--everything")
    adopt()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(config.getoption("--counts")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    return scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    extent.choose(config, items)


def pytest_collection_finish() -> None:
    """What the imports made stays: the garbage collector need not look at it after every few tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files; then read the diff")
    parser.addoption("--everything", action="store_true", help="slow tests and many examples too, as in make test-all")
    parser.addoption("--counts", metavar="FILE", help="write how many tests passed, failed and were skipped, as JSON")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten rather than compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Fails a test that leaves a process, a thread, a file in the checkout or an environment variable behind."""
    before = snapshot()
    yield
    left = left_since(before)
    if left:
        pytest.fail("it leaves behind:\n" + "\n".join(left), pytrace=False)

"""What pytest does around the tests: which it takes, how processes share them, and that none leaves anything behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.session import extent
from support.session.leftovers import Snapshot, adopt, left_since, snapshot
from support.session.seconds import Seconds
from support.session.sharing import scheduler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="slow tests and many examples too, as in make test-all")
    parser.addoption("--counts", metavar="FILE", help="write how many tests passed, failed and were skipped, as JSON")
    parser.addoption(
        "--grace", type=float, default=10.0, metavar="SECONDS", help="what processes and threads get to end"
    )


def pytest_configure(config: pytest.Config) -> None:
    extent.everything = config.getoption("--everything")
    adopt()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(config.getoption("--counts")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    return scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a process that waits for ranks or scripts leaves its core idle."""
    return (os.cpu_count() or 1) + 1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    extent.repeat(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    extent.choose(config, items)


_TOLD = set[str]()
"""What a test was blamed for: its file is not once more."""


def _left(before: Snapshot, config: pytest.Config) -> list[str]:
    found = left_since(before, config.getoption("--grace"))
    return [line for line in found if not (line.startswith("file ") and config.getoption("--update-golden", False))]


@pytest.fixture(autouse=True)
def leaves_nothing(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fails a test that leaves a process, a thread, a file in the checkout or a setting behind."""
    before = snapshot(pytestconfig.rootpath)
    yield
    if left := _left(before, pytestconfig):
        _TOLD.update(left)
        pytest.fail("it leaves behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def file_leaves_nothing(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fails the last test of a file whose fixtures leave something behind."""
    before = snapshot(pytestconfig.rootpath)
    yield
    if left := [line for line in _left(before, pytestconfig) if line not in _TOLD]:
        pytest.fail("its file leaves behind:\n" + "\n".join(left), pytrace=False)

"""Settings of the process that runs tests, and `--update-golden`, which rewrites expected texts. See README.md here."""

from __future__ import annotations

import gc
import os

import pytest

pytest_plugins = ["support.session.plugin"]

# Before torch is imported: threads cost more than they save on such small models, and gloo's workers need the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What the command line prints depends on the terminal, and xdist sets one of 80 columns.
for terminal in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(terminal, None)
# FX graphs are millions of small objects: with Python's thresholds garbage collection takes a fifth of the time.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    """What the imports made stays: the garbage collector need not look at it after every few tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files; then read the diff")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten rather than compared."""
    return bool(request.config.getoption("--update-golden"))

"""What all tests share: `--update-golden` rewrites the expected texts from what the code gives."""

from __future__ import annotations

import gc
import os

import pytest

# Before anything imports torch: threads cost more than they save on models this small, and gloo's workers run beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# FX graphs are millions of small objects: by Python's thresholds a fifth of the time is spent on looking for cycles.
gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files; then read the diff")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten rather than compared."""
    return bool(request.config.getoption("--update-golden"))

"""Whether this run has the slow tests too: `pytest --everything`, as `make test-all` calls it."""

from __future__ import annotations

import pytest

everything = False
"""Set before the files of tests are imported."""


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked `slow`, but in a run of everything."""
    if everything:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]

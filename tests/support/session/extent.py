"""How much a run has: `pytest --everything`, as `make test-all` calls it, has slow tests and all repetitions too."""

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


REPETITIONS = 20
"""How often a test marked `repeated` runs in a run of everything: one that failed without a reason that is known."""


def repeat(metafunc: pytest.Metafunc) -> None:
    """Repeats a test marked `repeated` in a run of everything."""
    if everything and metafunc.definition.get_closest_marker("repeated"):
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(REPETITIONS))

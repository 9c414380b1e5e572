"""How `pytest -n` shares the tests among its processes: a file stays whole, and all that start ranks stay together.

Tests of one file share fixtures and caches. Those of `RANKS` share a pool of worker processes, which takes both cores.
"""

from __future__ import annotations

from typing import Any

RANKS = "tests/distributed/"
FIRST = (RANKS, "tests/kernels/test_interpreted.py")
"""Begun first, because they take longest: other units fill the time until the last process ends."""


def unit_of(test: str) -> str:
    """The tests that one process runs together: a file, or `RANKS`."""
    return RANKS if test.startswith(RANKS) else test.partition("::")[0]


def scheduler(config: Any, log: Any) -> Any:
    """xdist's scheduler of scopes, with `unit_of` for a test's scope, and `FIRST` first."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            for unit in reversed(FIRST):
                if unit in self.workqueue:
                    self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)

    return Units(config, log)

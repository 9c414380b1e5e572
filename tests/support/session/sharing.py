"""How `pytest -n` shares the tests among its processes: a file stays whole, and all of the pool stay together.

Tests of one file share fixtures and caches. Those of `RANKS` share a pool of worker processes, which takes both cores;
files there that only start scripts wait for them most of the time, so they run beside the pool.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RANKS = "tests/distributed/"
LONG = "tests/kernels/test_interpreted.py", "tests/words/test_words.py"


@cache
def _uses_pool(file: str) -> bool:
    return "gloo:" in (ROOT / file).read_text(encoding="utf-8")


def unit_of(test: str) -> str:
    """The tests that one process runs together: a file, or those files of `RANKS` that use the pool."""
    file = test.partition("::")[0]
    return RANKS if file.startswith(RANKS) and _uses_pool(file) else file


def _order(unit: str) -> int:
    """Long units begin first, and those that wait begin beside the pool; small ones fill the time until the end."""
    if unit == RANKS:
        return 0
    return 1 if unit.startswith(RANKS) else 2 if unit in LONG else 3


def scheduler(config: Any, log: Any) -> Any:
    """xdist's scheduler of scopes, with `unit_of` for a test's scope, in their `_order`."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(min(self.workqueue, key=_order), last=False)
            super()._assign_work_unit(node)

    return Units(config, log)

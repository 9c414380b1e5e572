"""The time that steps take, and whether moves of experts have made them slower."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor

STEPS = 10
"""The steps before a move, and those after it, whose medians are compared."""

SLOWER = 1.05
"""How much longer steps may take after a move."""

AtHome = Mapping[int, Tensor]
"""The expert of each slot at home [ranks, experts of a rank], of layers by their numbers."""


class MoveGuard:
    """Takes the time of steps, from `start` to the next `stop`, and watches moves. `clock` gives seconds.

    Each rank has its own clock: `is_slower` decides by the means over ranks of what `medians` gives.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._last, self._before = deque[float](maxlen=STEPS), 0.0
        self._passed = 0
        self.homes_before: AtHome = {}
        """The homes before the moves that are watched, of the layers that moved; empty without any."""

    def stop(self) -> None:
        """A step begins: the one before it has ended."""
        if self._since is not None:
            self._last.append(self._clock() - self._since)
            self._passed += 1

    def start(self) -> None:
        """All that comes before the step has been done."""
        self._since = self._clock()

    @property
    def median(self) -> float | None:
        """Seconds of the last steps; None before the first has ended."""
        return statistics.median(self._last) if self._last else None

    @property
    def timed(self) -> int:
        """How many steps there are to compare with."""
        return len(self._last)

    def forget(self) -> None:
        """Compares nothing with the steps until now."""
        self._last.clear()

    def watch(self, before: AtHome) -> None:
        """Experts move, from these homes. Not watched where too few steps have passed to compare with."""
        if len(self._last) == STEPS:
            self.homes_before, self._before, self._passed = before, statistics.median(self._last), 0

    @property
    def is_due(self) -> bool:
        """Whether enough steps have passed since the moves that are watched."""
        return bool(self.homes_before) and self._passed >= STEPS

    def medians(self) -> tuple[float, float]:
        """Seconds of the steps before the moves, and after them, on this rank."""
        return self._before, statistics.median(self._last)

    def end(self) -> AtHome:
        """Ends the watch. Gives the homes before the moves."""
        before, self.homes_before = self.homes_before, {}
        return before


def is_slower(before: float, after: float) -> bool:
    """Whether moves are to be undone, by the seconds of a step before and after them."""
    return after > SLOWER * before

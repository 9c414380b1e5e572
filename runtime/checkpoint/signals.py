"""A signal that asks a job to save and end, such as the SIGTERM of torchrun or Slurm."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any


class SignalNotice:
    """Notes a signal instead of ending the process. A second signal has the effect that the first would have had."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._noted: set[int] = set()

    def has_arrived(self, number: int) -> bool:
        """Whether the signal has arrived since the first call, which begins to note it. Of the main thread."""
        if number not in self._before:
            self._before[number] = signal.signal(number, self._note)
        return number in self._noted

    def end(self, number: int) -> None:
        """Gives the signal the effect that it had before the first `has_arrived`: by default it ends the process."""
        self.restore()
        os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Puts the handlers before back."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
        self._noted.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._noted:
            self.end(number)
        self._noted.add(number)

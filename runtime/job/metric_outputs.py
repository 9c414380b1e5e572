"""The outputs of `job.metrics`: JSON lines and TensorBoard."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol


class Output(Protocol):
    """Writes the records of measured steps. Methods may raise `OSError` and `ValueError`."""

    def resume(self, steps: int) -> None:
        """Continues after step `steps`, that of a loaded checkpoint."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the figures of a step."""

    def close(self) -> None:
        """Writes buffered records."""


class JsonLines:
    """One JSON object per line, appended by one write; numbers that are not finite are null.

    The first line that is appended to a file with lines, and the first after a checkpoint was loaded, have `resumed`:
    the run continues after this step. Earlier lines with later steps belong to a lost run.
    """

    def __init__(self, path: str | PathLike[str], steps: int = 0) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - `close` closes it
        self._first: dict[str, int] = {}
        self.resume(steps)

    def resume(self, steps: int) -> None:
        self._first = {"resumed": steps} if self._file.seekable() and self._file.tell() else {}

    def write(self, record: Mapping[str, Any]) -> None:
        first, self._first = self._first, {}
        line = json.dumps(_finite({**record, **first}), allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "only a part of a line was written", self._file.name)

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars by name; those of layers as `load/3`. The package's writer writes them in a thread of its own.

    A run that continues after `steps` hides later scalars, which a lost run has written. The first record opens the
    file: a checkpoint may be loaded before.
    """

    def __init__(self, folder: str | PathLike[str], steps: int = 0) -> None:
        self._folder, self._steps = str(folder), steps
        self._writer: Any = None

    def resume(self, steps: int) -> None:
        self.close()
        self._steps, self._writer = steps, None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=self._steps + 1)
        for name, value in record.items():
            layers = value.items() if isinstance(value, Mapping) else [(None, value)]
            for layer, number in layers:
                if name != "step":
                    self._writer.add_scalar(name if layer is None else f"{name}/{layer}", number, record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

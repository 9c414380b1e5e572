"""Measurements that work, raise, die and hang, for the tests of `benchmarks/gpu_run.py`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from gpu_child import run_command


def works(device: str, value: float = 1.0) -> dict[str, Any]:
    return {"value": value, "process": os.getpid()}


def raises(device: str) -> dict[str, Any]:
    raise ValueError("a wrong number\nand more of it")


def dies(device: str) -> dict[str, Any]:
    print("an illegal memory access", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def exits(device: str) -> dict[str, Any]:
    os._exit(7)


def hangs(device: str, note: str) -> dict[str, Any]:
    """Hangs in a program that it starts, whose id is in the file `note`."""
    run_command(["sh", "-c", f"echo $$ > {note}.new; mv {note}.new {note}; exec sleep 600"], 600)
    return {}


def waits(device: str, path: str) -> dict[str, Any]:
    """Waits until there is a file of this name."""
    while not Path(path).exists():
        time.sleep(0.01)
    return {"value": 2.0}

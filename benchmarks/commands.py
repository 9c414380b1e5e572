"""Runs `moec` as a user does, and measures time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ran:
    """Seconds on the clock and of the processor that one finished command took, and its most memory, in bytes.

    `output` is what it printed, both streams together.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


def run_python(*arguments: str) -> Ran:
    """Runs this interpreter with `arguments` to its end. Exits, showing the output, if it fails.

    It may write bytecode, as an installed moec has it: compiling the sources would be most of a short command's time.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{output}")
    kilobyte = 1 if sys.platform == "darwin" else 1024
    return Ran(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * kilobyte, output)


def run_moec(*arguments: str, python: tuple[str, ...] = ()) -> Ran:
    """Runs `moec` with `arguments`, and the interpreter with the options `python`."""
    return run_python(*python, "-m", "moec", *arguments)

"""The process that measures for `gpu.py`: reads measurements from its input, and writes each result to a pipe.

`python gpu_child.py PIPE PARENT [MODULE ...]`: imports the modules while it waits for its input, so that the next
group's process starts up while this one's measures. It dies with its parent, and so does what it starts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process as soon as its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run_command(command: list[str], seconds: float, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command, which dies with this process; after so many seconds it is killed (-9).

    Its output goes to this process' own as well.
    """
    parent = os.getpid()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        preexec_fn=lambda: die_with(parent),
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
    text = said.decode(errors="replace")
    print(text, flush=True)
    return process.returncode, text


def why(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error).strip().partition("\n")[0]
    return text if type(error).__name__ in ("NotRun", "WrongError") else f"{type(error).__name__}: {text}"


def spent(device: str) -> bool:
    """Whether the device refuses this process from now on, as after an illegal access."""
    if device != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> None:
    die_with(int(sys.argv[2]))
    pipe = os.fdopen(int(sys.argv[1]), "w")

    def say(**message: Any) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    for module in sys.argv[3:]:
        importlib.import_module(module)
    given = json.loads(sys.stdin.readline() or '{"measurements": []}')
    for one in given["measurements"]:
        sys.stdout.flush()
        say(begin=one["key"], printed=os.fstat(sys.stdout.fileno()).st_size)
        module, _, name = one["function"].partition(":")
        started = time.perf_counter()
        try:
            found = {"result": getattr(importlib.import_module(module), name)(given["device"], **one["arguments"])}
            if spent(given["device"]):
                raise RuntimeError("the device reported an error after it")
        except Exception as error:  # noqa: BLE001 - whatever ends a measurement is the reason why it has no figure
            traceback.print_exc()
            found = {"failed": why(error)}
        say(key=one["key"], seconds=round(time.perf_counter() - started, 2), **found)
        if "failed" in found and spent(given["device"]):
            break


if __name__ == "__main__":
    main()

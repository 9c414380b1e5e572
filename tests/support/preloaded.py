"""Processes forked from one that has imported torch and moec: each begins in hundredths of a second, not in seconds.

`CONTEXT` starts functions, such as the pool's workers. `python()` is a program that runs scripts, modules and code as
the interpreter does; torchrun starts ranks with it by `PYTHON_EXEC`. `make test-all` has the real one in its place.
"""

from __future__ import annotations

import atexit
import builtins
import io
import json
import multiprocessing
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from multiprocessing import process as processes
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from support.session import extent

IMPORTED = [
    "torch.distributed.run",
    "moec.cli",
    "moec.driver",
    "moec.passes.pipeline",
    "moec.runtime.job.job",
]
"""What the process that all others are forked from has imported."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(IMPORTED)

CLIENT = Path(__file__).parent / "scripts" / "preloaded_client.py"
MOST_BYTES = 1 << 17
"""Of a request: words, folder and environment."""

_folder: tempfile.TemporaryDirectory[str] | None = None
"""Of the program and its socket; it goes when the tests end."""


@cache
def preloaded() -> str:
    """The path of an interpreter that has imported torch and moec when it begins. `torchrun` is beside it."""
    global _folder
    _folder = tempfile.TemporaryDirectory(prefix="moec-python-")
    folder = Path(_folder.name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    server = CONTEXT.Process(target=_serve, args=(listener,), daemon=True)
    server.start()
    listener.close()
    client = shlex.join([sys.executable, "-IS", str(CLIENT), str(folder / "socket")])
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (folder / name).write_text(f'#!/bin/sh\nexec {client} {module} "$@"\n')
        (folder / name).chmod(0o755)
    return str(folder / "python")


def python() -> str:
    """`preloaded()`, in `make test-all` the real interpreter."""
    return sys.executable if extent.everything or sys.platform != "linux" else preloaded()


def environment(**more: str) -> dict[str, str]:
    """Variables for `python()`, with which torchrun starts its ranks by `python()` too."""
    none = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in none}
    own = {"PYTHON_EXEC": python(), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return kept | own | more


# ---- the process that forks -----------------------------------------------------------------------------


def _serve(listener: socket.socket) -> None:
    """Forks an interpreter for each connection, until the tests' process ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while parent.sentinel not in select.select([listener, parent.sentinel], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _supervise(connection)
        connection.close()


def _supervise(connection: socket.socket) -> NoReturn:
    """Starts what the client asks for, passes its signals on, and tells it the exit status.

    A client that is killed takes the interpreter with it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, *_ = socket.recv_fds(connection, MOST_BYTES, 3)
    words, folder, variables, numbers = json.loads(request)
    child = os.fork()
    if child == 0:
        connection.close()
        _become(words, folder, variables, dict(zip(numbers, files, strict=True)))
    for file in files:
        os.close(file)
    end = os.pidfd_open(child)
    while end not in select.select([connection, end], [], [])[0]:
        number = connection.recv(1)
        os.kill(child, number[0] if number else signal.SIGKILL)
        if not number:
            break
    _, status = os.waitpid(child, 0)
    with suppress(OSError):  # the client may be gone
        connection.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(words: list[str], folder: str, variables: dict[str, str], files: dict[int, int]) -> NoReturn:
    """Runs `python *words` in this process, and ends it as the interpreter does. `files`: the standard ones."""
    os.setsid()
    for number in range(3):
        os.close(number)
    for number, file in files.items():
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # `multiprocessing` may start others from here, as from an interpreter that it has not started itself.
    multiprocessing.current_process().name = "MainProcess"
    processes._current_process._config.pop("daemon")  # type: ignore[attr-defined]
    processes._parent_process = None  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    unbuffered = words[0] == "-u"
    sys.stdin = os.fdopen(0, closefd=False) if 0 in files else None
    streams = [_stream(number, unbuffered) if number in files else None for number in (1, 2)]
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams
    sys.excepthook = sys.__excepthook__
    status = _status_of(words[unbuffered:])
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the other threads
    atexit._run_exitfuncs()
    for stream in filter(None, streams):
        stream.flush()
    os._exit(status)


def _stream(number: int, unbuffered: bool) -> io.TextIOWrapper:
    errors = "strict" if number == 1 else "backslashreplace"
    raw = os.fdopen(number, "wb", closefd=False)
    return io.TextIOWrapper(raw, errors=errors, write_through=unbuffered, line_buffering=number == 2)


def _status_of(words: list[str]) -> int:
    """Runs a script, `-m MODULE` or `-c CODE`; its exit status."""
    try:
        _run(*words)
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return (ended.code or 0) & 255
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  (the interpreter's)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _run(kind: str, *words: str) -> None:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = dict.fromkeys([str(Path(kind).resolve().parent) if kind[0] != "-" else "", *path, *sys.path])
    if kind == "-m":
        sys.argv = list(words)
        sys.modules.pop(words[0], None)  # runpy warns of a module that is there
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        text, name = words[0], "<string>"
    else:
        sys.argv = [kind, *words]
        text, name = Path(kind).read_text(encoding="utf-8"), os.path.join(os.getcwd(), kind)
        main.__file__ = name
    exec(compile(text, name, "exec"), main.__dict__)  # noqa: S102

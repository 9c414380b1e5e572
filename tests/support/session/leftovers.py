"""What a test leaves behind: processes, threads, files in the checkout, variables, the working folder, modes of torch.

The fixture `leaves_nothing` compares before and after each test. Fixtures of a module or of the session begin
before it and end after it, and may keep what they need.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

KEPT_COMMANDS = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Parts of the command lines of processes that libraries start once for all."""

KEPT_THREADS = ("execnet", "tqdm_monitor", "moec-experts")
"""Beginnings of the names of threads that libraries, and moec itself, start once for all."""

OTHERS_VARIABLES = ("PYTEST_", "TORCHINDUCTOR_", "TORCHELASTIC_", "TORCH_", "TRITON_CACHE_DIR", "KMP_")
"""Beginnings of the names of variables that pytest changes in each test, and libraries when they are imported."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is at one moment; `files` are the names in each folder of the checkout `root`."""

    root: Path
    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    files: Mapping[str, frozenset[str]]
    settings: Mapping[str, Any]


def adopt() -> None:
    """Makes orphans of child processes children of this one, so that they are found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def snapshot(root: Path) -> Snapshot:
    """What there is now."""
    return Snapshot(root, frozenset(_children()), frozenset(threading.enumerate()), _listing(root), settings())


def left_since(before: Snapshot, grace: float) -> list[str]:
    """What there is and was not, one line each. Ends the processes, removes nothing, restores the settings.

    Processes and threads that are ending get `grace` seconds for it.
    """
    return [*_processes(before, grace), *_threads(before, grace), *_files(before), *changed(before.settings)]


def _processes(before: Snapshot, grace: float) -> Iterator[str]:
    until = time.monotonic() + grace
    while (new := _new_processes(before)) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in sorted(new):
        yield f"process {pid}: {_read(pid, 'cmdline')}"
        os.kill(pid, signal.SIGKILL)


def _new_processes(before: Snapshot) -> set[int]:
    # The children of the fork server, such as the pool's workers, are its own until it or they end.
    new = _children() - before.processes - {forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
    return {pid for pid in new if not _ended_or_kept(pid)}


def _children() -> set[int]:
    """The processes that this one has started, or whose parents ended.

    Read twice: the list leaves some out while another one ends (proc(5), /proc/pid/task/tid/children).
    """
    found = set[int]()
    for task in [*Path("/proc/self/task").glob("*/children")] * 2:
        try:
            found.update(map(int, task.read_text().split()))
        except FileNotFoundError:  # a thread that has ended meanwhile
            continue
    return found


def _ended_or_kept(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(")")[2].split()
    return not state or state[0] in "ZX" or any(kept in _read(pid, "cmdline") for kept in KEPT_COMMANDS)


def _read(pid: int, file: str) -> str:
    """A file of /proc/PID, NULs as spaces; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _threads(before: Snapshot, grace: float) -> Iterator[str]:
    for thread in set(threading.enumerate()) - before.threads:
        if thread.name.startswith(KEPT_THREADS) or isinstance(thread, threading._DummyThread):
            continue  # a dummy is a thread of C++ that ran Python, as autograd's of a GPU do: nothing can join it
        thread.join(grace)
        if thread.is_alive():
            yield f"thread {thread.name}"


def _files(before: Snapshot) -> Iterator[str]:
    for folder, names in _listing(before.root).items():
        was = before.files.get(folder, names)
        new = sorted(names - was) if names is not was else ()
        yield from (f"file {os.path.join(folder, name)}" for name in new if not _is_ignored(folder, name))


_LISTED: dict[str, tuple[int, frozenset[str]]] = {}


def _listing(root: Path) -> dict[str, frozenset[str]]:
    """The names in each folder of the checkout, read again where they have changed."""
    found = {}
    for folder in _folders(root):
        with suppress(FileNotFoundError):
            changed = os.stat(folder).st_mtime_ns
            if folder not in _LISTED or _LISTED[folder][0] != changed:
                _LISTED[folder] = changed, frozenset(os.listdir(folder))
            found[folder] = _LISTED[folder][1]
    return found


@cache
def _folders(root: Path) -> tuple[str, ...]:
    """The folders of the checkout that have a tracked file: others are git's, or made by tools."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False).stdout
    parents = {parent for file in listed.splitlines() for parent in Path(file).parents}
    return tuple(sorted(str(root / parent) for parent in parents if (root / parent).is_dir()))


def _is_ignored(folder: str, name: str) -> bool:
    """Whether git ignores a file, or it is hidden, as editors' copies are."""
    return (
        name.startswith(".")
        or name.endswith("~")
        or (subprocess.run(["git", "check-ignore", "-q", name], cwd=folder, check=False).returncode == 0)
    )


FOLDER = "the working folder"

OF_TORCH: dict[str, tuple[str, str]] = {
    "torch's default dtype": ("get_default_dtype", "set_default_dtype"),
    "torch's grad mode": ("is_grad_enabled", "set_grad_enabled"),
    "torch's deterministic algorithms": ("are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    "torch's number of threads": ("get_num_threads", "set_num_threads"),
}
"""Settings of torch, and the functions that read and set each."""


def settings() -> dict[str, Any]:
    """The environment variables, the working folder and settings of torch."""
    found: dict[str, Any] = {n: value for n, value in os.environ.items() if not n.startswith(OTHERS_VARIABLES)}
    found[FOLDER] = os.path.realpath("/proc/self/cwd")
    if torch := sys.modules.get("torch"):
        found |= {name: getattr(torch, read)() for name, (read, _) in OF_TORCH.items()}
    return found


def changed(before: Mapping[str, Any]) -> Iterator[str]:
    """The settings that are others than `before`, one line each, and puts them back."""
    now = settings()
    for name in sorted(now.keys() | before.keys()):
        was = before.get(name)
        if now.get(name) == was or (name in OF_TORCH and was is None):
            continue
        yield f"{'' if name in (FOLDER, *OF_TORCH) else 'variable '}{name}: {now.get(name)!r}, was {was!r}"
        if name == FOLDER:
            os.chdir(was)
        elif name in OF_TORCH:
            getattr(sys.modules["torch"], OF_TORCH[name][1])(was)
        else:
            os.environ.pop(name, None)
            os.environ.update({name: was} if was is not None else {})

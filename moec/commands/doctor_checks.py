"""The checks of `moec doctor`, which return findings; none of them imports torch."""

from __future__ import annotations

import ipaddress
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from moec.commands.console.output import document
from moec.commands.console.version import TESTED, installed, parsed

State = Literal["ok", "note", "wrong"]
MIN_SHM, MIN_TEMPORARY = 1 << 30, 1 << 28
OPTIONAL = {
    "tensorboard": ("tensorboard", "`job.metrics` writes to TensorBoard", "tensorboard"),
    "quack": ("quack-kernels", "experts' products by quack, on Hopper and newer", "quack-kernels"),
    "transformers": ("transformers", "`moec.from_hf` of a config object; folders need no package", "transformers"),
}
"""Optional packages: the name of the distribution, what it is for, and what to install."""


CHOOSES_ONE = " (`pip install PATH` of moec's checkout or wheel chooses one)"


@document
class Finding:
    """One thing that was looked at. `state` is wrong where training cannot work, note where something is limited."""

    name: str
    state: State
    found: str
    help: str
    """What to do, and why it matters; empty where there is nothing to do."""


def finding(name: str, state: State, found: str, help: str = "") -> Finding:
    """A `Finding`."""
    return Finding(name=name, state=state, found=found, help=help)


def versions() -> Iterator[Finding]:
    """Python, and the packages that moec needs."""
    yield _tested("Python", platform.python_version(), "")
    for package in ("torch", "triton"):
        version = installed(package)
        if version is not None:
            yield _tested(package, version, CHOOSES_ONE)
        elif package == "torch":
            help = "training and `moec verify` need it: `pip install torch`; check, inspect and compile work without"
            yield finding("torch", "wrong", "not installed", help)
        else:
            help = "kernels on GPUs need it: `pip install triton`; CPUs do not"
            yield finding("triton", "note", "not installed", help)
    for package in ("numpy", "lark", "pydantic", "jinja2", "safetensors", "rich", "click"):
        version = installed(package)
        if version is None:
            yield finding(package, "wrong", "not installed", f"moec needs it: `pip install {package}`")
        else:
            yield finding(package, "ok", version)


def _tested(name: str, version: str, suffix: str) -> Finding:
    oldest, newest = (".".join(map(str, bound)) for bound in TESTED[name])
    if parsed(version) < TESTED[name][0]:
        return finding(name, "wrong", version, f"moec needs {name} {oldest} or newer{suffix}")
    if parsed(version) > TESTED[name][1]:
        return finding(name, "note", version, f"newer than what moec is tested with, {oldest} to {newest}")
    return finding(name, "ok", version)


def packages() -> Iterator[Finding]:
    """The optional packages."""
    for name, (package, purpose, install) in OPTIONAL.items():
        version = installed(package)
        help = "" if version else f"optional, for {purpose}: `pip install '{install}'`"
        yield finding(name, "ok" if version else "note", version or "not installed", help)


def installation() -> Iterator[Finding]:
    """Whether `moec` and `torch` are the installed ones, and not files of the current folder."""
    import moec

    folder = Path(moec.__file__).parent
    yield finding("moec", "ok", str(folder))
    for name in ("torch", "triton"):
        shadow = next((path for path in (Path(f"{name}.py"), Path(name, "__init__.py")) if path.is_file()), None)
        if shadow is not None:
            help = f"scripts in this folder import it in place of {name}: rename it"
            yield finding(str(shadow), "wrong", f"hides the package {name}", help)
    module = Path("moec", "__init__.py")
    if module.is_file() and folder.resolve() != module.parent.resolve():
        help = "scripts in this folder import that one: work in another folder, or `pip install -e .` it"
        yield finding("moec here", "note", f"{module.parent.resolve()} is another moec than the installed one", help)


def machine() -> Iterator[Finding]:
    """Cores, memory, shared memory, and the folders that are written to."""
    yield finding("cores", "ok", str(os.cpu_count()))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    yield finding("memory", "ok", f"{memory / 1e9:.3g} GB")
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        small = size < MIN_SHM
        help = "NCCL and data loaders with workers need it: in a container say `--shm-size 8g`, in Kubernetes mount an "
        help += "emptyDir of medium Memory there (`moec launch --k8s` does)"
        yield finding("/dev/shm", "note" if small else "ok", f"{size / 1e9:.3g} GB", help if small else "")
    yield _writable("temporary folder", Path(tempfile.gettempdir()), "TMPDIR")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    yield _writable("Triton's cache", cache, "TRITON_CACHE_DIR")


def _writable(name: str, folder: Path, variable: str) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return finding(name, "wrong", f"{folder} cannot be written", f"set {variable} to a folder that can")
    free = shutil.disk_usage(existing).free
    if free < MIN_TEMPORARY:
        return finding(name, "wrong", f"{folder} has {free / 1e6:.3g} MB left", f"make room, or set {variable}")
    return finding(name, "ok", f"{folder}, {free / 1e9:.3g} GB free")


def network() -> Iterator[Finding]:
    """Whether this machine's name has an address, which gloo and torchrun ask for, and other nodes could reach it."""
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        help = f"ranks find each other by it. One machine: add `127.0.0.1 {name}` to /etc/hosts. Several nodes: "
        help += "add the address that the other nodes reach, or set GLOO_SOCKET_IFNAME to that interface (`ip addr`)"
        yield finding("hostname", "wrong", f"{name} has no address ({error})", help)
        return
    if ipaddress.ip_address(address).is_loopback:
        help = "several nodes: the others cannot reach ranks of this one at it. Map the name to the address that they "
        help += "reach, in /etc/hosts, or set GLOO_SOCKET_IFNAME to that interface (`ip addr`). One machine: it is fine"
        yield finding("hostname", "note", f"{name}, {address}: this machine itself", help)
        return
    yield finding("hostname", "ok", f"{name}, {address}")


def variables() -> Iterator[Finding]:
    """Environment variables that change what runs."""
    known = ("MOEC_BACKEND",)
    for name in sorted(os.environ):
        if name.startswith("MOEC_") and name not in known:
            yield finding(name, "note", os.environ[name], f"moec reads no such variable; it reads {', '.join(known)}")
        elif name in known or name.startswith(("NCCL_", "GLOO_", "TRITON_")) or name == "CUDA_VISIBLE_DEVICES":
            yield finding(name, "ok", os.environ[name] or "(empty)")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        crowded = threads.isdecimal() and int(threads) > (os.cpu_count() or 1)
        help = "more threads than cores: ranks wait for each other; `moec launch --run` divides cores over ranks"
        yield finding("OMP_NUM_THREADS", "note" if crowded else "ok", threads, help if crowded else "")
    if sys.platform != "linux":
        help = "moec is tested on Linux; on macOS CPUs work, GPUs and triton need Linux"
        yield finding("platform", "note", platform.platform(), help)

"""Copies of the checkout in which mutants are made and tests run: the checkout itself is never touched.

`tree` is the copy as it was taken, `mutated` the one in which a file is changed. Both stay until `copy` takes new ones,
so that a recording, a draw and a run agree while the checkout goes on. Tests import moec from the copy's link tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mutation.drawing import ROOMS
from mutation.mutant import Mutant

CHECKOUT = Path(__file__).parents[2]
FOLDER = CHECKOUT / ".mutants"
PLUGINS = Path(__file__).parent / "in_tests"
TREE, MUTATED = "tree", "mutated"


class WrongImportError(Exception):
    """Tests in a copy would not import the copy."""


def copies(folder: Path, *, again: bool = False) -> tuple[Path, Path]:
    """The two copies, made if there are none: as taken, and to be mutated. `again`: take new ones."""
    if again or not (folder / TREE / ".types").is_dir():
        for name in (TREE, MUTATED):
            _copy(folder / name)
    _restore(folder / TREE, folder / MUTATED)
    return folder / TREE, folder / MUTATED


def _copy(into: Path) -> None:
    shutil.rmtree(into, ignore_errors=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in sorted({name for name in names if (CHECKOUT / name).is_file()}):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, into / name)
    for arguments in (["init", "--quiet"], ["add", "--all"]):  # some tests ask git what is tracked
        subprocess.run(["git", *arguments], cwd=into, check=True, capture_output=True)
    # The link tree of the Makefile, and the same links in `moec`, which Python finds first in the working folder.
    links = into / ".types" / "moec"
    links.mkdir(parents=True)
    for room in (*ROOMS[:-1], "tests/diagnostics"):
        name = room.replace("tests/diagnostics", "pages")
        (into / "moec" / name).symlink_to(Path("..", room))
    for path in (into / "moec").iterdir():
        (links / path.name).symlink_to(Path("../../moec", path.name))


def _restore(tree: Path, mutated: Path) -> None:
    """Undoes what an interrupted run has left."""
    for room in ROOMS:
        for path in (tree / room).rglob("*"):
            there = mutated / path.relative_to(tree)
            if path.suffix in (".py", ".j2") and path.read_bytes() != there.read_bytes():
                _write(there, path.read_bytes())


@contextmanager
def mutated_file(mutated: Path, mutant: Mutant) -> Iterator[None]:
    """The mutant, in the copy to be mutated."""
    path = mutated / mutant.file
    source = path.read_bytes()
    _write(path, mutant.applied(source))
    try:
        yield
    finally:
        _write(path, source)


def _write(path: Path, content: bytes) -> None:
    """Python looks only at a file's seconds and size to know whether its bytecode is old."""
    path.write_bytes(content)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def environment(copy: Path, **more: str) -> dict[str, str]:
    """The environment of tests in a copy; their child processes get it too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "PYTEST_", "RANK"))}
    path = os.pathsep.join([str(copy / ".types"), str(PLUGINS)])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def require_own_import(copy: Path) -> None:
    """Raises `WrongImportError` unless Python, started in the copy as tests are, imports every room from the copy."""
    modules = ("moec.grammar", "moec.passes", "moec.codegen.kernels", "moec.runtime", "moec.commands")
    code = f"import importlib, os; [print(os.path.realpath(importlib.import_module(m).__file__)) for m in {modules}]"
    command = [sys.executable, "-c", code]
    for folder in (copy, copy.parent):  # with moec in the working folder, and without
        done = subprocess.run(command, cwd=folder, env=environment(copy), capture_output=True, text=True, check=True)
        for path in done.stdout.split():
            if not Path(path).is_relative_to(copy.resolve()):
                raise WrongImportError(f"tests in {copy} would import {path}")

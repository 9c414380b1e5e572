"""Replaces each `use` by the statements of the used file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit
from moec.grammar.resolve.files import read_source
from moec.grammar.resolve.library import LIBRARY, library_paths
from moec.grammar.source import Span
from moec.grammar.suggest import advice, meant, nearest
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import Statement, String, Use

MAX_USE_DEPTH = 32
MAX_FILES = 256


class Files:
    """Reads a main file and the files that it uses. `folder` is the main file's; None for a text without one.

    `used_at` has the `use` of every other file.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.diagnostics: list[Diagnostic] = []
        self.complete = True
        self.used_at: dict[str, Span] = {}
        self._seen: set[str] = set()
        self._stack: list[str] = []

    def read(self, statements: Iterable[Statement], identity: str, folder: Path | None) -> list[Statement]:
        """`statements` of the file known as `identity` in `folder`, every `use` replaced by what it brings."""
        self._seen.add(identity)
        self._stack.append(identity)
        result: list[Statement] = []
        for statement in statements:
            if isinstance(statement, Use):
                result += self._use(statement.path, folder)
            else:
                result.append(statement)
        self._stack.pop()
        return result

    def _use(self, path: String, folder: Path | None) -> list[Statement]:
        if path.value in library_paths():
            return self._read_once(path, f"library:{path.value}", LIBRARY / f"{path.value}.moe", None)
        target = self._beside(path, folder)
        if target is None:
            self.complete = False
            return []
        return self._read_once(path, str(target), target, target.parent)

    def _read_once(self, path: String, identity: str, file: Path, folder: Path | None) -> list[Statement]:
        if identity in self._stack:
            self._error("MOE0010", path, "this file is still being read: it comes back to itself")
            return []
        if identity in self._seen:
            return []
        if len(self._seen) > MAX_FILES:
            self._error("MOE0404", path, f"more than {MAX_FILES} files are used")
            return []
        if len(self._stack) > MAX_USE_DEPTH:
            self._error("MOE0404", path, f"files use each other more than {MAX_USE_DEPTH} deep")
            return []
        name = f"{identity}.moe" if folder is None else self._name(file)
        self.used_at.setdefault(name, path.span)
        source, diagnostics = read_source(file, name)
        self.diagnostics += diagnostics
        tree = None
        if source is not None:
            tree, diagnostics = parse(source)
            self.diagnostics += diagnostics
        if tree is None:
            self.complete = False
            return []
        return self.read(tree.body, identity, folder)

    def _beside(self, path: String, folder: Path | None) -> Path | None:
        """The file that `path` names beside the file in `folder`, or None after a diagnostic."""
        text = path.value
        if not text or text.startswith("/") or "\\" in text or re.match(r"[A-Za-z]:", text):
            help = "the library's `clusters/dgx_h100`, or a path beside this file, with `/` between its parts"
            self._error("MOE0011", path, "not a relative path", help)
            return None
        if folder is None:
            self._missing(path, "not in the library, and this text is in no folder")
            return None
        wanted = folder / (text if text.endswith(".moe") else f"{text}.moe")
        try:
            target = wanted.resolve()
            inside = target.is_relative_to(folder.resolve())
            exists = target.exists()
        except (OSError, RuntimeError, ValueError):  # a loop of symbolic links, a name too long
            self._error("MOE0011", path, "the path does not lead to a file")
            return None
        if not inside and ".." not in text.split("/"):
            self._error("MOE0011", path, "a symbolic link leads out of this file's folder")
            return None
        if not exists:
            self._missing(path, "neither in the library nor beside this file")
            return None
        return target

    def _name(self, file: Path) -> str:
        assert self.folder is not None
        return Path(os.path.relpath(file, self.folder.resolve())).as_posix()

    def _missing(self, path: String, message: str) -> None:
        best, slip = nearest(path.value, library_paths()), meant(path.value, library_paths())
        fix = [Edit(path.span, f'"{slip}"')] if slip else []
        folder = (best or path.value).partition("/")[0]
        models = "`moec init --list` lists the library's models"
        in_folder = [known for known in library_paths() if known.startswith(f"{folder}/")]
        if folder == "models":
            help = f"did you mean `{best}`? {models}" if best else models
        elif in_folder:
            help = advice(path.value, in_folder)
        else:
            others = [known for known in library_paths() if not known.startswith("models/")]
            help = f"{advice(path.value, others)}; {models}"
        self._error("MOE0009", path, message, help, fix)

    def _error(self, code: str, path: String, message: str, help: str = "", fix: Iterable[Edit] = ()) -> None:
        self.complete = False
        self.diagnostics.append(diagnose(code, path.span, message, help=help, fix=fix))

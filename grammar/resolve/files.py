"""Reads files, and replaces each `use` by the statements of the used file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit, InternalError, Severity
from moec.grammar.folder_kinds import CHECKPOINT, HUGGING_FACE, PLAN, PLAN_TEXT
from moec.grammar.source import Source, Span
from moec.grammar.suggest import advice, meant, nearest
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tokens import invisible, tabs
from moec.grammar.syntax.tree import Statement, String, Use

MAX_BYTES = 4 * 1024 * 1024
MAX_USE_DEPTH = 32
MAX_FILES = 256

_LIBRARY = Path(__file__).parents[1] / "library"


def read_source(path: Path, name: str) -> tuple[Source | None, list[Diagnostic]]:
    """The source at `path`, called `name`, or the diagnostic of the read error."""
    nowhere = Span(Source(name, ""), 0, 0)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        what, help = _what_a_folder_is(path)
        return None, [diagnose("MOE0002", nowhere, what, help=help)]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return None, [diagnose("MOE0001", nowhere, reason, help=_file_beside(path))]
    return source_of(data, name)


def _what_a_folder_is(path: Path) -> tuple[str, str]:
    """What a folder is in which a file is wanted, and what to do with it."""
    if (path / PLAN).is_file():
        help = f"`moec inspect {path}` and `moec verify {path}` take the plan; its file is {path}/{PLAN_TEXT}"
        return "this is a plan: it is compiled already", help
    if (path / HUGGING_FACE).is_file():
        return "this is a folder of Hugging Face", f"`moec import hf {path}` writes a `.moe` file"
    if (path / CHECKPOINT).is_file():
        return "this is a checkpoint", f"`moec checkpoint inspect {path}` shows it"
    files = _files_in(path)
    return "", f"name a file in it{': ' + ', '.join(f'{path}/{name}' for name in files) if files else ''}"


def _file_beside(path: Path) -> str:
    """The file whose name is nearest to that of a file that is not there, or all that are beside it."""
    beside = _files_in(path.parent)
    if not beside or os.path.lexists(path):
        return ""
    if best := nearest(path.name, beside):
        return f"did you mean `{path.parent / best}`?"
    return f"`.moe` files there: {', '.join(beside)}"


MOST_FILES_LISTED = 8


def _files_in(folder: Path) -> list[str]:
    """The first `.moe` files of a folder, by name; none of one that cannot be read."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".moe"))[:MOST_FILES_LISTED]
    except (OSError, ValueError):
        return []


def source_of(data: bytes, name: str) -> tuple[Source | None, list[Diagnostic]]:
    """The bytes of a file as a source."""
    nowhere = Span(Source(name, ""), 0, 0)
    if len(data) > MAX_BYTES:
        return None, [diagnose("MOE0008", nowhere, f"more than {MAX_BYTES // 1024**2} MiB")]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        source = Source(name, data.decode("utf-8", "replace"))
        at = len(data[: error.start].decode("utf-8", "replace"))
        message = f"byte 0x{data[error.start]:02x} is no part of UTF-8 text here"
        return None, [diagnose("MOE0003", Span(source, at, at + 1), message, help="save the file as UTF-8")]
    return checked_source(text, name)


def checked_source(text: str, name: str) -> tuple[Source | None, list[Diagnostic]]:
    """`text` as a source, with diagnostics about its characters."""
    warnings = []
    if text.startswith("\ufeff"):
        text = text[1:]
        span = Span(Source(name, text), 0, 0)
        fix = [Edit(span, "")]  # the text has no mark any more: writing it back is the fix
        help = "save it as UTF-8 without it"
        warnings.append(diagnose("MOE0005", span, help=help, severity=Severity.WARNING, fix=fix))
    source = Source(name, text)
    if (at := text.find("\0")) >= 0:
        return None, [diagnose("MOE0004", Span(source, at, at + 1), "here", help="is this a text file?")]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return None, [diagnose("MOE0003", Span(source, error.start, error.start + 1), "half of a surrogate pair")]
    if (at := text.find("\r\n")) >= 0:
        span = Span(source, at, at + 1)
        help = "they are read as newlines; save the file with newlines alone"
        fix = [Edit(Span(source, found.start(), found.start() + 1), "") for found in re.finditer("\r\n", text)]
        warnings.append(diagnose("MOE0006", span, help=help, severity=Severity.WARNING, fix=fix))
    warnings += [*tabs(source), *invisible(source)]
    return source, warnings


@dataclass(slots=True)
class Files:
    """Reads a main file and what it uses. `folder` is where "beside this one" is; None for a text without one.

    `used_at` is the place that brought each other file in.
    """

    folder: Path | None
    diagnostics: list[Diagnostic] = field(default_factory=list)
    complete: bool = True
    used_at: dict[str, Span] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _stack: list[str] = field(default_factory=list)

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
            return self._read_once(path, f"library:{path.value}", _LIBRARY / f"{path.value}.moe", None)
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


@cache
def library_paths() -> tuple[str, ...]:
    """The paths of the library for `use`, such as `clusters/dgx_h100`."""
    return tuple(sorted(path.relative_to(_LIBRARY).with_suffix("").as_posix() for path in _LIBRARY.rglob("*.moe")))


def library_names(folder: str) -> list[str]:
    """The names in the library's `folder` ("clusters", "devices")."""
    return [path.rpartition("/")[2] for path in library_paths() if path.startswith(f"{folder}/")]


def library_text(path: str) -> str:
    """The text of a library file."""
    return (_LIBRARY / f"{path}.moe").read_text(encoding="utf-8")


@cache
def read_library(path: str) -> tuple[Statement, ...]:
    """The statements of a library file."""
    source, diagnostics = read_source(_LIBRARY / f"{path}.moe", f"library:{path}.moe")
    tree, more = parse(source) if source else (None, [])
    if tree is None or diagnostics or more:
        raise InternalError(f"the library's {path} is not good: {[*diagnostics, *more]}")
    return tree.body

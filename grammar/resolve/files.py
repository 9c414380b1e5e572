"""Reads a file as a source, or diagnoses why it cannot be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit, Severity
from moec.grammar.folder_kinds import command_for, in_words, is_file_of_moec, kind_of, listed
from moec.grammar.source import Source, Span
from moec.grammar.suggest import nearest
from moec.grammar.syntax.tokens import invisible, tabs

MAX_BYTES = 4 * 1024 * 1024


def read_source(path: Path, name: str) -> tuple[Source | None, list[Diagnostic]]:
    """The source at `path`, called `name`, or the diagnostic of the read error."""
    nowhere = Span(Source(str(path) if path.name == name else name, ""), 0, 0)
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
    """The kind of a folder that is given in place of a file, and a help."""
    kind = kind_of(path)
    if kind is not None:
        return f"this is {in_words(kind)}" + ": it is compiled already" * (kind == "plan"), command_for(kind, path)
    files = listed(path, is_file_of_moec)
    return "", f"name a file in it{': ' + ', '.join(f'{path}/{name}' for name in files) if files else ''}"


def _file_beside(path: Path) -> str:
    """A help for a missing file: the file with the nearest name, or all files of its folder."""
    beside = listed(path.parent, is_file_of_moec)
    if not beside or os.path.lexists(path):
        return ""
    if best := nearest(path.name, beside):
        return f"did you mean `{path.parent / best}`?"
    return f"`.moe` files there: {', '.join(beside)}"


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
        fix = [Edit(Span(source, match.start(), match.start() + 1), "") for match in re.finditer("\r\n", text)]
        warnings.append(diagnose("MOE0006", span, help=help, severity=Severity.WARNING, fix=fix))
    warnings += [*tabs(source), *invisible(source)]
    return source, warnings

"""`moec fmt`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moec.commands.check import show, write
from moec.grammar.diagnostics import Diagnostic, Severity
from moec.grammar.format import formatted
from moec.grammar.resolve.files import read_source, source_of
from moec.grammar.source import Source
from moec.grammar.syntax.parser import parse


def run(files: Sequence[Path], check: bool, diff: bool, style: str = "full") -> int:
    """Formats files in place, `-` from stdin to stdout. `check` and `diff` write nothing. Returns the exit status."""
    status = 0
    for file in files:
        before, source, diagnostics = _read(file)
        errors = [found for found in diagnostics if found.severity is Severity.ERROR]
        if errors or source is None:
            show(errors, style)
            status = 1
            continue
        after = formatted(source)
        if str(file) == "-" and not (check or diff):
            sys.stdout.write(after)
        if before == after:
            continue
        if diff:
            sys.stdout.writelines(_difference(file, before, after))
        if check or diff:
            print(f"{file}: would be formatted", file=sys.stderr)
            status = 1
        elif str(file) != "-":
            write(file, after)
            print(f"{file}: formatted", file=sys.stderr)
    return status


def _read(file: Path) -> tuple[str, Source | None, list[Diagnostic]]:
    """The file's text, its source, and its syntax errors."""
    if str(file) == "-":
        data = sys.stdin.buffer.read()
        source, diagnostics = source_of(data, "<stdin>")
    else:
        source, diagnostics = read_source(file, str(file))
        data = file.read_bytes() if source else b""
    if source is not None:
        diagnostics = [*diagnostics, *parse(source)[1]]
    return data.decode("utf-8", "replace"), source, diagnostics


def _difference(file: Path, before: str, after: str) -> list[str]:
    from difflib import unified_diff

    lines = unified_diff(before.splitlines(True), after.splitlines(True), str(file), f"{file} (formatted)")
    return [line if line.endswith("\n") else f"{line}\n" for line in lines]

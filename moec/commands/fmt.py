"""`moec fmt`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moec.commands.console.documents import FormattedFile
from moec.commands.console.other_files import not_moe
from moec.commands.console.output import print_json, show
from moec.commands.console.replace_file import replace_file
from moec.grammar.diagnostics import Diagnostic, Severity
from moec.grammar.format import formatted
from moec.grammar.resolve.files import read_source, source_of
from moec.grammar.source import Source
from moec.grammar.syntax.parser import parse


def run(files: Sequence[Path], check: bool, diff: bool, style: str = "full") -> int:
    """Formats files in place, `-` from stdin to stdout. `check` and `diff` write nothing. Returns the exit status."""
    status = 0
    documents: list[FormattedFile] = []
    all_errors: list[Diagnostic] = []
    for file in files:
        original, source, diagnostics = _read(file)
        errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity is Severity.ERROR]
        if errors or source is None:
            all_errors += errors
            status = 1
            continue
        result = formatted(source)
        stdin, changed = str(file) == "-", original != result
        written = changed and not (stdin or check or diff)
        difference = "".join(_difference(file, original, result)) if diff and changed else None
        if written:
            replace_file(file, original, result)
        if changed and (check or diff):
            status = 1
        text = result if stdin and not (check or diff) else None
        documents.append(FormattedFile(file=str(file), changed=changed, written=written, diff=difference, text=text))
    if style == "json":
        print_json(documents)
    else:
        for document in documents:
            _say(document)
    show(all_errors, style)
    return status


def _say(document: FormattedFile) -> None:
    """One file for people: text and differences on stdout, what happened on stderr."""
    sys.stdout.write(document.text or document.diff or "")
    if document.changed and document.text is None:
        print(f"{document.file}: {'formatted' if document.written else 'would be formatted'}", file=sys.stderr)


def _read(file: Path) -> tuple[str, Source | None, list[Diagnostic]]:
    """The file's text, its source, and its syntax errors."""
    if diagnostic := not_moe(file, "moec fmt"):
        return "", None, [diagnostic]
    if str(file) == "-":
        data = sys.stdin.buffer.read()
        source, diagnostics = source_of(data, "<stdin>")
    else:
        source, diagnostics = read_source(file, str(file))
        data = file.read_bytes() if source else b""
    if source is not None:
        diagnostics = [*diagnostics, *parse(source)[1]]
    return data.decode("utf-8", "replace"), source, diagnostics


def _difference(file: Path, original: str, result: str) -> list[str]:
    from difflib import unified_diff

    lines = unified_diff(original.splitlines(True), result.splitlines(True), str(file), f"{file} (formatted)")
    return [line if line.endswith("\n") else f"{line}\n" for line in lines]

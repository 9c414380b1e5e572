"""`moec check`: every mistake of some files, and what a machine can mend of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moec.grammar.diagnostics import Diagnostic, Edit, Severity, render

ROUNDS = 10
"""A mended word can bring a further mistake to light; so many times it is looked again."""


def run(files: Sequence[Path], lets: Mapping[str, str], style: str = "full", fix: bool = False) -> int:
    """Says what is wrong with `files`, after mending what it can if `fix`; gives the exit status."""
    from moec.driver import check

    found: list[Diagnostic] = []
    for file in files:
        diagnostics = check(file, **lets)
        for _ in range(ROUNDS if fix else 0):
            mended = mend(file, diagnostics)
            again = check(file, **lets) if mended else diagnostics
            if not mended:
                break
            print(f"{file}: {mended} mended", file=sys.stderr)
            diagnostics = again
        found += diagnostics
    show(found, style)
    return 1 if any(d.severity is Severity.ERROR for d in found) else 0


def mend(file: Path, diagnostics: Iterable[Diagnostic]) -> int:
    """Applies the fixes of `diagnostics` to `file` and to the files beside it that it uses; gives how many.

    Of two that overlap only the first is applied. The library and the command line are not edited.
    """
    edits: dict[str, list[Edit]] = {}
    texts: dict[str, str] = {}
    count = 0
    for diagnostic in diagnostics:
        fix = diagnostic.fix
        if not fix or any(edit.span.source.name.startswith(("library:", "--let")) for edit in fix):
            continue
        source = fix[0].span.source
        taken = edits.setdefault(source.name, [])
        texts[source.name] = source.text
        if not any(_overlap(edit, other) for edit in fix for other in taken):
            taken += fix
            count += 1
    for name, chosen in edits.items():
        text = texts[name]
        for edit in sorted(chosen, key=lambda edit: edit.span.start, reverse=True):
            text = text[: edit.span.start] + edit.text + text[edit.span.end :]
        write(file.parent / name, text)
    return count


def write(file: Path, text: str) -> None:
    """Puts `text` in the place of what is in `file`: all of it, or none."""
    fresh = file.with_name(f".{file.name}.fresh")
    fresh.write_bytes(text.encode())
    fresh.chmod(file.stat().st_mode)
    fresh.replace(file)


def show(diagnostics: Iterable[Diagnostic], style: str) -> None:
    """Diagnostics go to stderr; only a terminal that wants them gets colours."""
    found = list(diagnostics)
    if found:
        color = style == "full" and sys.stderr.isatty() and "NO_COLOR" not in os.environ
        print(render(found, style, color=color).rstrip("\n"), file=sys.stderr)


def _overlap(one: Edit, other: Edit) -> bool:
    a, b = one.span, other.span
    return (a.start < b.end and b.start < a.end) or a.start == b.start

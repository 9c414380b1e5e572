"""The automatic fixes of diagnostics, applied to the files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moec.commands.new_file import replace_file
from moec.grammar.diagnostics import Diagnostic, Edit


def apply_fixes(file: Path, diagnostics: Iterable[Diagnostic]) -> int:
    """Applies the fixes of `diagnostics` to `file` and to the files that it uses; returns their number.

    Of two overlapping fixes only the first is applied. The library and the command line are not edited.
    """
    edits: dict[str, list[Edit]] = {}
    texts: dict[str, str] = {}
    count = 0
    for diagnostic in diagnostics:
        fix = diagnostic.fix
        if not fix or any(edit.span.source.name.startswith(("library:", "--let")) for edit in fix):
            continue
        source = fix[0].span.source
        chosen_edits = edits.setdefault(source.name, [])
        texts[source.name] = source.text
        if not any(_overlap(edit, other) for edit in fix for other in chosen_edits):
            chosen_edits += fix
            count += 1
    for name, chosen in edits.items():
        text = texts[name]
        for edit in sorted(chosen, key=lambda edit: edit.span.start, reverse=True):
            text = text[: edit.span.start] + edit.text + text[edit.span.end :]
        replace_file(file.parent / name, text)
    return count


def _overlap(one: Edit, other: Edit) -> bool:
    a, b = one.span, other.span
    return (a.start < b.end and b.start < a.end) or a.start == b.start

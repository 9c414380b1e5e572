"""Fixes of diagnostics, applied to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.commands.fixes import apply_fixes
from moec.grammar.diagnostics import Edit, diagnose
from moec.grammar.source import Source, Span

TEXT = 'model "m" { dim = 64; depth = 2 }\n'


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_of_two_fixes_that_overlap_the_first_is_applied(tmp_path: Path, first: str) -> None:
    file, source, at = tmp_path / "a.moe", Source("a.moe", TEXT), TEXT.index("dim")
    file.write_text(TEXT)
    edits = {"inner": Edit(Span(source, at + 6, at + 8), "32"), "outer": Edit(Span(source, at, at + 8), "dim = 128")}
    found = [diagnose("MOE0311", None, "")._replace(fix=(edits[name],)) for name in sorted(edits, key=first.__ne__)]
    assert len(apply_fixes(file, found)) == 1
    assert file.read_text() == TEXT.replace("64", "32" if first == "inner" else "128")

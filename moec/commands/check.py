"""`moec check`: every error in files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from moec.commands.console.output import show
from moec.commands.console.terminal import failure, success
from moec.grammar.diagnostics import Diagnostic, Severity, printable, render

STDIN = "<stdin>"
ROUNDS = 10
"""The most times that a file is checked again: a fix can reveal another error."""


def run(
    files: Sequence[Path], lets: Mapping[str, str], style: str = "full", fix: bool = False, stdin_name: str = STDIN
) -> int:
    """Reports every error in `files`, with `fix` after applying fixes; returns the exit status.

    Diagnostics are this command's result: as JSON they go to stdout, `[]` if there are none. In other commands they go
    to stderr in every style. The file `-` is stdin, called `stdin_name`; it is not fixed.
    """
    from moec.commands.console.other_files import not_moe
    from moec.driver import check

    diagnostics_by_file: list[tuple[str, tuple[Diagnostic, ...]]] = []  # of each file; one can be given twice
    for file in files:
        if str(file) == "-":
            diagnostics_by_file.append((stdin_name, _check_stdin(stdin_name, lets)))
            continue
        if not_a_moe_file := not_moe(file, "moec check"):
            diagnostics_by_file.append((str(file), (not_a_moe_file,)))
            continue
        diagnostics = check(file, **lets)
        if fix:
            diagnostics = _fixed(file, diagnostics, lets)
        diagnostics_by_file.append((str(file), diagnostics))
    all_diagnostics = [diagnostic for _, diagnostics in diagnostics_by_file for diagnostic in diagnostics]
    if style == "json":
        print(render(all_diagnostics, style), end="")
    else:
        show(all_diagnostics, style)
        if sys.stderr.isatty():  # pipes and editors read diagnostics only
            print("\n".join(_verdict(name, diagnostics) for name, diagnostics in diagnostics_by_file), file=sys.stderr)
    return 1 if any(d.severity is Severity.ERROR for d in all_diagnostics) else 0


def _fixed(file: Path, diagnostics: tuple[Diagnostic, ...], lets: Mapping[str, str]) -> tuple[Diagnostic, ...]:
    """Applies fixes to `file` until there are none; returns the diagnostics that are left."""
    from moec.commands.fixes import apply_fixes, in_words
    from moec.driver import check, check_text

    try_text = partial(check_text, name=file.name, folder=file.parent, lets=lets)
    applied = False
    for _ in range(ROUNDS):
        fixed = apply_fixes(file, diagnostics, try_text)
        if not fixed:
            if diagnostics and not applied:
                print(f"{printable(str(file))}: nothing has a fix that is sure", file=sys.stderr)
            break
        applied = True
        diagnostics = check(file, **lets)
        for fix in fixed:
            print(f"fixed {in_words(fix)}", file=sys.stderr)
    return diagnostics


def _verdict(name: str, diagnostics: Sequence[Diagnostic]) -> str:
    """`✓ a.moe`, or `✗ 2 errors, 1 warning in a.moe`; warnings alone are no failure."""
    errors = sum(diagnostic.severity is Severity.ERROR for diagnostic in diagnostics)
    numbers = (errors, "error"), (len(diagnostics) - errors, "warning")
    counts = [f"{number} {noun}{'s' * (number > 1)}" for number, noun in numbers if number]
    text = f"{', '.join(counts)} in {printable(name)}" if counts else printable(name)
    return failure(text, sys.stderr) if errors else success(text, sys.stderr)


def _check_stdin(name: str, lets: Mapping[str, str]) -> tuple[Diagnostic, ...]:
    """The diagnostics of the text on stdin. Its `use` statements look beside the file `name`."""
    from moec.driver import check_text

    folder = Path() if name == STDIN else Path(name).parent
    return check_text(sys.stdin.buffer.read(), name, folder, lets)

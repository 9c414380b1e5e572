"""The warning about a plan whose `.moe` file, beside it, has changed since it was compiled."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from moec.codegen.plan import Plan
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Severity, diagnose
from moec.grammar.folder_kinds import PLAN
from moec.grammar.spec import Spec

USE = re.compile(r'\buse\s+"([^"\n]+)"')
TRACE = re.compile(r'\btrace\(\s*"([^"\n]+)"')


def stale(path: Path, plan: Plan) -> Diagnostic | None:
    """MOE0605 where `first.moe`, beside the plan `first.plan`, or a file that it uses has changed since, and no longer
    says what the plan has; also for another trace of loads, where there is one that can be read.

    Changed comments are no difference. A plan does not store the values of `--let`: with some, any newer file differs.
    """
    from moec.grammar.load import load_file
    from moec.open_words import allows

    if path.suffix != ".plan":
        return None
    file = path.with_suffix(".moe")
    try:
        compiled = (path / PLAN).stat()
        is_newer = any(_is_newer(used.stat(), compiled) for used in _with_used(file, set()))
    except OSError:
        return None
    if not is_newer:
        return None
    spec = load_file(file).spec
    changed = f"`{file}`"
    if spec is not None and allows(spec, plan.spec):
        if not _has_other_trace(spec, file, plan.spec):
            return None
        changed = f"the trace of `{file}`"
    message = f"{changed} has changed since `{path}` was compiled"
    command = f"`moec compile {quote(str(file))}` compiles it again"
    help = f"{command}; nothing to do if the older plan, or its `--let`, is meant"
    return diagnose("MOE0605", None, message, help=help, severity=Severity.WARNING)


def _has_other_trace(spec: Spec, file: Path, plan: Spec) -> bool:
    """Whether the plan keeps numbers of another trace than the file's, if that can be read."""
    from moec.measured_loads import with_loads
    from moec.open_words import allows

    try:
        return not allows(with_loads(spec, file), plan)
    except DiagnosticError as error:
        return error.diagnostics[0].code != "MOE0510"


def _is_newer(file: os.stat_result, plan: os.stat_result) -> bool:
    """Whether the file was written or moved here later than the plan: a moved or copied file keeps its `mtime`."""
    return file.st_mtime_ns > plan.st_mtime_ns or file.st_ctime_ns > plan.st_ctime_ns


def _with_used(file: Path, seen: set[Path]) -> Iterator[Path]:
    """The file, its trace, and those of its folder that it uses, and so on; names of the library are no files."""
    if file in seen:
        return
    seen.add(file)
    yield file
    text = file.read_text(encoding="utf-8", errors="replace")
    yield from (file.parent / name for name in TRACE.findall(text) if (file.parent / name).is_file())
    for name in USE.findall(text):
        for used in (file.parent / name, file.parent / f"{name}.moe"):
            if used.is_file():
                yield from _with_used(used, seen)

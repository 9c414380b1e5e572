"""A plan whose `.moe` file has changed since it was compiled: a warning where both lie beside each other."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from moec.codegen.plan import Plan
from moec.grammar.diagnostics import Diagnostic, Severity
from moec.grammar.folder_kinds import PLAN


def stale(path: Path, plan: Plan) -> Diagnostic | None:
    """MOE0605 where `first.moe`, beside the plan `first.plan`, is newer and does not say what the plan has.

    Other comments say nothing else. The values of `--let` are not kept in a plan: after those, any newer file differs.
    """
    from moec.grammar.diagnostics.codes import diagnose
    from moec.grammar.load import load_file

    if path.suffix != ".plan":
        return None
    file = path.with_suffix(".moe")
    try:
        is_newer = file.stat().st_mtime_ns > (path / PLAN).stat().st_mtime_ns
    except OSError:
        return None
    if not is_newer or load_file(file).spec == plan.spec:
        return None
    message = f"`{file}` has changed since `{path}` was compiled"
    again = f"`moec compile {quote(str(file))}` compiles it again"
    help = f"{again}; nothing to do if the older plan, or its `--let`, is meant"
    return diagnose("MOE0605", None, message, help=help, severity=Severity.WARNING)

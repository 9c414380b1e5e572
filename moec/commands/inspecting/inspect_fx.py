"""`moec inspect PLAN --fx`: the torch.fx graphs that a job builds from the plan's Program."""

from __future__ import annotations

from pathlib import Path

from moec.codegen.plan import Plan
from moec.commands.console.given_plan import given_plan


def inspect_fx(path: Path, style: str) -> str:
    """The text."""
    return fx_of(given_plan(path, style))


def fx_of(plan: Plan) -> str:
    """The FX graphs of a plan in memory. Imports torch."""
    from moec.codegen.emit.fx_text import fx_text
    from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)

    return fx_text(plan.program)

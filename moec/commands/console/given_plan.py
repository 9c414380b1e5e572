"""Reads the plan that a command takes as an argument."""

from __future__ import annotations

from pathlib import Path

from moec.codegen.plan import Plan
from moec.commands.console.output import show
from moec.driver import valid_plan
from moec.stale import stale


def given_plan(path: Path, style: str, *, trust_nothing: bool = False) -> Plan:
    """Reads the plan as `moec.load` does, and warns on stderr if its file has changed since. Raises `PlanError`."""
    plan = valid_plan(path, trust_nothing=trust_nothing)
    if warning := stale(path, plan):
        show([warning], style)
    return plan

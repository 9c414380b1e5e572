"""`moec load`: whether a plan is complete and valid. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from moec.commands.console.documents import LoadedPlan
from moec.commands.console.given_plan import given_plan
from moec.commands.console.other_files import require_plan
from moec.commands.console.output import emit
from moec.grammar.amounts import count


def run(path: Path, trust_nothing: bool, style: str) -> None:
    """Loads the plan in the folder `path` and says what it is. Raises `DiagnosticError` for one that is not valid."""
    require_plan(path, "moec load")
    plan = given_plan(path, style, trust_nothing=trust_nothing)
    parameters = len(plan.parameters)
    emit(
        style,
        lambda: [f"{path}: {plan.name}, {count(plan.world_size, 'rank')}, {count(parameters, 'parameter')}, valid"],
        lambda: LoadedPlan(plan=str(path), name=plan.name, ranks=plan.world_size, parameters=parameters),
    )

"""The text of `moec inspect PLAN`."""

from __future__ import annotations

from pathlib import Path

from moec.commands.inspecting.inspect_plan import plan_document, plan_lines
from moec.commands.inspecting.inspect_rank import rank_document, rank_lines
from moec.driver import load


def inspected(path: Path, rank: int | None = None) -> str:
    """What the command shows of the plan in `path`, or of one rank of it."""
    plan = load(path)
    return "\n".join(plan_lines(plan_document(plan)) if rank is None else rank_lines(rank_document(plan, rank)))

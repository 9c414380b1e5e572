"""What gives the diagnostics of plans beside their files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from support.plans import moe_plan, moe_text

from moec.driver import valid_plan
from moec.grammar.diagnostics import Diagnostic


def file_that_changed() -> Sequence[Diagnostic]:
    from moec.stale import stale

    plan, file = Path("tiny.plan"), Path("tiny.moe")
    moe_plan().save(plan)
    file.write_text(moe_text(experts=4))
    os.utime(file, (2**32, 2**32))
    found = stale(plan, valid_plan(plan))
    return [found] if found else []


PLAN_EVENTS: dict[str, Callable[[], Sequence[Diagnostic]]] = {"MOE0605": file_that_changed}

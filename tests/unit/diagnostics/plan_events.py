"""What gives the diagnostics of plans beside their files, and of traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.plans import moe_plan, moe_text
from support.traces import trace_of, with_trace, write_traced

from moec.driver import valid_plan
from moec.grammar.diagnostics import Diagnostic, DiagnosticError


def file_that_changed() -> Sequence[Diagnostic]:
    from moec.stale import stale

    plan, file = Path("tiny.plan"), Path("tiny.moe")
    moe_plan().save(plan)
    file.write_text(moe_text(experts=4))
    os.utime(file, (2**32, 2**32))
    found = stale(plan, valid_plan(plan))
    return [found] if found else []


def planned(file: Path, *placing: Any) -> Sequence[Diagnostic]:
    from moec.commands.planning.loads import Placing
    from moec.commands.planning.plan import run

    with pytest.raises(DiagnosticError) as error:
        run(file, {}, "full", placing=Placing(*placing))
    return error.value.diagnostics


def no_trace() -> Sequence[Diagnostic]:
    Path("traced.moe").write_text(with_trace(moe_text()))
    return planned(Path("traced.moe"))


def trace_of_another_model() -> Sequence[Diagnostic]:
    return planned(write_traced(Path(), moe_text(), trace_of(experts=16)))


def counts_below_zero() -> Sequence[Diagnostic]:
    counts = trace_of()
    counts[3, 1, 0, 5] = -1
    return planned(write_traced(Path(), moe_text(), counts))


def placement_without_a_trace() -> Sequence[Diagnostic]:
    Path("tiny.moe").write_text(moe_text())
    return planned(Path("tiny.moe"), "greedy")


PLAN_EVENTS: dict[str, Callable[[], Sequence[Diagnostic]]] = {
    "MOE0510": no_trace,
    "MOE0511": trace_of_another_model,
    "MOE0512": counts_below_zero,
    "MOE0513": placement_without_a_trace,
    "MOE0605": file_that_changed,
}

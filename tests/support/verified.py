"""Plans that must equal the unsharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import Report


def require_equal(plan: Plan | Spec | Path, **options: Any) -> Report:
    """The report of `verify`, which must have found no difference. `options`: those of `verify`."""
    report = verify(plan if isinstance(plan, Plan) else compile_source(plan), **options)
    assert report.ok, report
    return report

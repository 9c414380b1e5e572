"""`moec verify`: runs the comparison, shows its progress, and prints its report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moec.commands.console.output import emit
from moec.commands.console.progress import progress
from moec.commands.console.terminal import failure, success
from moec.commands.verify_document import verify_document
from moec.grammar.amounts import count
from moec.runtime.verify.verify_report import BOUND, STEP_BOUND, Report, Rounding


def run(path: Path, style: str, *, trust_nothing: bool, scale: bool | None) -> bool:
    """Verifies the plan in `path`, prints the report; returns whether the plan is right. Raises `DiagnosticError`."""
    from moec.commands.console.given_plan import given_plan
    from moec.driver import verify

    plan = given_plan(path, style, trust_nothing=trust_nothing)
    with progress(f"verifying {count(plan.world_size, 'rank')}") as bar:
        report = verify(plan, scale=scale, progress=bar.at)
    emit(style, lambda: report_lines(path, report), lambda: verify_document(path, report))
    return report.ok


def report_lines(path: Path, report: Report) -> Iterator[str]:
    """The report for people: the verdict, a table of errors and bounds, and the largest difference."""
    verdict = "equals" if report.ok else "DOES NOT equal"
    manner = "verified at toy widths" if report.scaled else "verified"
    ranks = count(report.world_size, "rank")
    head = f"{path}: {ranks}, {manner} on a virtual cluster: the plan {verdict} the unsharded {report.subject}"
    yield success(head) if report.ok else failure(head)
    if report.repeats:
        yield f"  {count(report.repeats, 'layer')} not run: of equal layers two were"
    if report.placements:
        yield f"  also in {count(report.placements, 'step')} with experts in other places, at random"
    if report.scaled:
        yield f"  toy widths: {', '.join(map(str, report.widths)) or 'none, its widths were as small already'}"
    yield ""
    yield from _table(report)
    yield ""
    yield f"  largest difference: {_largest(report)}"
    if report.rounding is not None:
        yield from _beyond(report.rounding)
    if report.first_difference is not None:
        yield f"  first difference: {report.first_difference}"


def _table(report: Report) -> Iterator[str]:
    output = "logits and loss" if report.subject == "model" else "y and aux_loss"
    yield f"            {output:>15}   gradients and one step   bound"
    yield f"  float64   {report.max_output_error:15.1e}   {report.max_gradient_error:22.1e}   {BOUND:.0e}"
    rounding = report.rounding
    if rounding is not None:
        ratios = f"{rounding.output:13.2g} ×   {rounding.gradient:20.2g} ×"
        bound = f"{rounding.bound:g} × the unsharded {report.subject}'s error in {rounding.dtype}"
        yield f"  {rounding.dtype:7}   {ratios}   {bound}"
    elif report.ok:
        yield "  The rounding of the plan's own dtype shows at full widths only: here float64 decides alone."
    single = report.float32
    if single is not None:
        errors = f"{single.max_output_error:15.1e}   {single.max_gradient_error:22.1e}"
        yield f"  float32   {errors}   does not decide: a near tie may go to another expert"


def _largest(report: Report) -> str:
    """The place and its error; where only the plan's own dtype refuses it, the place there."""
    rounding = report.rounding
    if rounding is not None and not rounding.ok:
        return f"{rounding.worst}, in {rounding.dtype}"
    return f"{report.largest.error:.1e}, {report.largest}"


def _beyond(rounding: Rounding) -> Iterator[str]:
    if rounding.mean > rounding.mean_bound:
        yield (
            f"  the geometric mean of the gradients' errors is {rounding.mean:.2g} × the unsharded model's; "
            f"the bound is {rounding.mean_bound:g} ×"
        )
    if rounding.step > STEP_BOUND:
        yield f"  one step of the optimizer differs by {rounding.step:.1e} of the step; the bound is {STEP_BOUND:g}"

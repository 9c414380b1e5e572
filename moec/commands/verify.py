"""What `moec verify` prints."""

from __future__ import annotations

from pathlib import Path

from moec.commands.summary import count
from moec.runtime.verify.verify_report import BOUND, STEP_BOUND, Report


def print_report(path: Path, report: Report) -> None:
    """The report for people."""
    verdict = "equals" if report.ok else "DOES NOT equal"
    ranks = count(report.world_size, "rank")
    print(f"{path}: {ranks}, verified on a virtual cluster: the plan {verdict} the unsharded {report.subject}")
    if report.scaled:
        print(f"verified at toy widths: {', '.join(map(str, report.widths)) or 'they were as small already'}")
    print()
    output = "logits and loss" if report.subject == "model" else "y and aux_loss"
    print(f"            {output:>15}   gradients and one step   bound")
    print(f"  float64   {report.max_output_error:15.1e}   {report.max_gradient_error:22.1e}   {BOUND:.0e}")
    rounding = report.rounding
    if rounding is not None:
        ratios = f"{rounding.output:13.2g} ×   {rounding.gradient:20.2g} ×"
        bound = f"{rounding.bound:g} × the unsharded {report.subject}'s error in {rounding.dtype}"
        print(f"  {rounding.dtype:7}   {ratios}   {bound}")
    elif report.ok:
        print("  (in the plan's own dtype nothing was measured: at toy widths float64 alone decides)")
    single = report.float32
    if single is not None:
        print(f"  float32   {single.max_output_error:15.1e}   {single.max_gradient_error:22.1e}   (for information)")
    print(f"\n  largest difference: the {report.worst}")
    if rounding is not None and rounding.mean > rounding.mean_bound:
        print(
            f"  gradients are off by {rounding.mean:.2g} ×, as a geometric mean; the bound is {rounding.mean_bound:g} ×"
        )
    if rounding is not None and rounding.step > STEP_BOUND:
        print(f"  one step of the optimizer is off by {rounding.step:.1e} of the step, the bound is {STEP_BOUND:g}")
    if report.first_difference is not None:
        print(f"  first difference: {report.first_difference}")

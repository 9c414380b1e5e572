"""What `moec verify` prints."""

from __future__ import annotations

from pathlib import Path

from moec.commands.summary import count
from moec.runtime.verify import BOUND, Report


def print_report(path: Path, report: Report) -> None:
    """The report for people."""
    verdict = "equals" if report.ok else "DOES NOT equal"
    ranks = count(report.world_size, "rank")
    print(f"{path}: {ranks}, verified on a virtual cluster: the plan {verdict} the unsharded model")
    if report.scaled:
        print(f"verified at toy widths: {', '.join(map(str, report.widths)) or 'they were as small already'}")
    print()
    print("            logits and loss   gradients and one step   bound")
    print(f"  float64   {report.max_output_error:15.1e}   {report.max_gradient_error:22.1e}   {BOUND:.0e}")
    single = report.float32
    if single is not None:
        print(f"  float32   {single.max_output_error:15.1e}   {single.max_gradient_error:22.1e}   (for information)")
    print(f"\n  furthest off: the {report.worst}")
    if report.first_difference is not None:
        print(f"  first difference: {report.first_difference}")

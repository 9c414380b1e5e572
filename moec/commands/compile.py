"""`moec compile`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from moec.codegen.plan import Plan, make_plan
from moec.commands.summary import summary
from moec.driver import read, run_passes
from moec.grammar import to_text
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.passes.ir import Program
from moec.passes.ir.text import print_program
from moec.passes.pipeline import Record


def run(
    file: Path,
    output: Path | None,
    lets: Mapping[str, str],
    emit: str | None,
    stop_after: str | None,
    print_ir_after: str | None,
    time_passes: bool,
) -> tuple[Diagnostic, ...]:
    """Compiles `file` and writes the plan, or prints the form that `emit` names; returns the warnings."""
    from moec import __version__

    started = time.perf_counter()
    loaded = read(file, **lets)
    if emit == "ast" and loaded.tree is not None:
        print(loaded.tree)
        return loaded.diagnostics
    if loaded.spec is None:
        raise DiagnosticError(loaded.diagnostics)
    if emit == "spec":
        print(to_text(loaded.spec), end="")
        return loaded.diagnostics
    if emit == "ir" and stop_after is None:
        stop_after = "lower"
    compilation = run_passes(loaded.spec, stop_after)
    for record in compilation.records:
        if print_ir_after in ("all", record.name) or (print_ir_after == "changed" and _changed(record)):
            print(f"// after {record.name}{_op_change(record)}\n{print_program(record.after)}", file=sys.stderr)
    if time_passes:
        _print_times(compilation.records)
    if emit in ("ir", "placed"):
        print(print_program(compilation.program), end="")
        return loaded.diagnostics
    plan = make_plan(loaded.spec, compilation.program, __version__)
    if emit == "fx":
        from moec.commands.inspect_fx import fx_of

        print(fx_of(plan), end="")
        return loaded.diagnostics
    if emit == "kernels":
        from moec.commands.inspect_kernels import sources_of_kernels

        print(sources_of_kernels(plan))
        return loaded.diagnostics
    _write(plan, compilation.program, output or Path(f"{file.stem}.plan"), started)
    return loaded.diagnostics


def _write(plan: Plan, program: Program, output: Path, started: float) -> None:
    plan.save(output)
    print(summary(plan, program, output, time.perf_counter() - started))


def _changed(record: Record) -> bool:
    return record.before != record.after


def _op_change(record: Record) -> str:
    if record.before is None:
        return f": {record.after.num_ops} ops"
    change = record.after.num_ops - record.before.num_ops
    return f": {record.after.num_ops} ops ({change:+d})"


def _print_times(records: list[Record]) -> None:
    total = sum(record.seconds for record in records)
    for record in records:
        print(f"{record.seconds * 1e3:9.2f} ms  {record.name}{_op_change(record)}", file=sys.stderr)
    print(f"{total * 1e3:9.2f} ms  total", file=sys.stderr)

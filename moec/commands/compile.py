"""`moec compile`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from moec.codegen.plan import make_plan
from moec.codegen.search_report import report_of
from moec.commands.compile_document import EmittedStage, Stage, compiled
from moec.commands.console.output import emit as show_result
from moec.commands.console.output import print_json
from moec.commands.console.terminal import success
from moec.commands.inspecting.summary import summary
from moec.commands.planning.choices import chosen_lines, searched
from moec.driver import read
from moec.grammar import to_text
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.measured_loads import with_loads
from moec.open_words import compile_chosen
from moec.passes.ir.texts.text import print_program
from moec.passes.pipeline import Record


def run(
    file: Path,
    output: Path | None,
    lets: Mapping[str, str],
    emit: Stage | None,
    stop_after: str | None,
    print_ir_after: str | None,
    time_passes: bool,
    style: str = "full",
) -> tuple[Diagnostic, ...]:
    """Compiles `file` and writes the plan, or prints the form that `emit` names; returns the warnings."""
    from moec import __version__

    started = time.perf_counter()
    loaded = read(file, **lets)
    if emit == "ast" and loaded.tree is not None:
        _emit_stage(emit, f"{loaded.tree}\n", style)
        return loaded.diagnostics
    if loaded.spec is None:
        raise DiagnosticError(loaded.diagnostics)
    if emit == "spec":
        _emit_stage(emit, to_text(loaded.spec), style)
        return loaded.diagnostics
    if emit == "ir" and stop_after is None:
        stop_after = "lower"
    spec = with_loads(loaded.spec, file)
    choice = searched(spec)
    compilation = compile_chosen(spec, choice, stop_after)
    for record in compilation.records:
        if print_ir_after in ("all", record.name) or (print_ir_after == "changed" and _changed(record)):
            print(f"// after {record.name}{_op_change(record)}\n{print_program(record.after)}", file=sys.stderr)
    if time_passes:
        _print_times(compilation.records)
    if emit == "ir" or emit == "placed":
        _emit_stage(emit, print_program(compilation.program), style)
        return loaded.diagnostics
    chosen = spec if choice is None else choice.chosen.spec
    plan = make_plan(chosen, compilation.program, __version__, report_of(spec, choice))
    if emit == "fx":
        from moec.commands.inspecting.inspect_fx import fx_of

        _emit_stage(emit, fx_of(plan), style)
        return loaded.diagnostics
    if emit == "kernels":
        from moec.commands.inspecting.inspect_kernels import sources_of_kernels

        _emit_stage(emit, f"{sources_of_kernels(plan)}\n", style)
        return loaded.diagnostics
    folder = output or Path(f"{file.stem}.plan")
    plan.save(folder)
    seconds = time.perf_counter() - started
    program = compilation.program
    show_result(
        style,
        lambda: [success(summary(plan, program, folder, seconds, chosen_lines(plan.report)))],
        lambda: compiled(plan, program, folder, seconds),
    )
    return loaded.diagnostics


def _emit_stage(stage: Stage, text: str, style: str) -> None:
    """Prints the text that `--emit` names, which ends in a newline."""
    if style == "json":
        print_json(EmittedStage(stage=stage, text=text))
    else:
        print(text, end="")


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

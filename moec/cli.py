"""The command line. It holds no semantics: what changes a plan is in the file, or overrides one of its `let`s.

Exit 0: done; 1: diagnostics; 2: usage; 3: a mistake of moec's own. stdout is the artifact, stderr the diagnostics.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from moec import __version__
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Severity, diagnose, render

app = typer.Typer(
    help="The compiler for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Lets = Annotated[list[str] | None, typer.Option("--let", metavar="NAME=VALUE", help="Override a `let` of the file.")]
Format = Annotated[str, typer.Option("--format", help="How diagnostics look: full, concise, json or github.")]
STYLES = ("full", "concise", "json", "github")


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="`.moe` files.")],
    lets: Lets = None,
    format: Format = "full",
) -> None:
    """Say what is wrong with files; nothing if nothing is. Never imports torch."""
    from moec.driver import check as run

    _require("--format", format, STYLES)
    found: list[Diagnostic] = []
    for file in files:
        found += run(file, **_lets(lets))
    _show(found, format)
    if any(d.severity is Severity.ERROR for d in found):
        raise typer.Exit(1)


@app.command()
def compile(
    file: Annotated[Path, typer.Argument(help="A `.moe` file.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of the plan; default: FILE's name.plan.")
    ] = None,
    lets: Lets = None,
    format: Format = "full",
    emit: Annotated[str | None, typer.Option(help="Print ast, spec, ir, placed or fx, and write no plan.")] = None,
    stop_after: Annotated[str | None, typer.Option(help="Run no pass after this one (with --emit=ir).")] = None,
    print_ir_after: Annotated[
        str | None, typer.Option(help="Print the Program after a pass: its name, `all`, or `changed`.")
    ] = None,
    time_passes: Annotated[bool, typer.Option("--time-passes", help="Print how long each pass took.")] = False,
) -> None:
    """Turn a `.moe` file into a plan. Never imports torch."""
    from moec.commands.compile import PASS_CHOICES, STAGES, run

    _require("--format", format, STYLES)
    _require("--emit", emit, STAGES)
    _require("--stop-after", stop_after, PASS_CHOICES[:-2])
    _require("--print-ir-after", print_ir_after, PASS_CHOICES)
    if stop_after and emit not in ("ir", "placed"):
        raise typer.BadParameter("--stop-after makes no plan; it goes with --emit=ir")
    warnings = run(file, output, _lets(lets), emit, stop_after, print_ir_after, time_passes)
    _show(warnings, format)


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(help="A plan folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    trust_nothing: Annotated[
        bool, typer.Option("--trust-nothing", help="Compile the Spec inside the plan again and compare first.")
    ] = False,
) -> None:
    """Prove a plan equal to the unsharded model: every rank in this process, forward, gradients and one step."""
    gc.enable()  # `moec.__main__` has it off for short commands; this one makes graphs by the thousand
    from moec.commands.verify import print_report
    from moec.driver import load
    from moec.driver import verify as run

    report = run(load(plan, trust_nothing=trust_nothing))
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print_report(plan, report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def load(
    plan: Annotated[Path, typer.Argument(help="A plan folder.")],
    trust_nothing: Annotated[
        bool, typer.Option("--trust-nothing", help="Compile the Spec inside it again and compare.")
    ] = False,
) -> None:
    """Check that a plan is whole and holds nothing that it may not. Never imports torch."""
    from moec.driver import load as run

    loaded = run(plan, trust_nothing=trust_nothing)
    print(f"{plan}: {loaded.name}, {loaded.world_size} ranks, {len(loaded.parameters)} parameters, whole")


NOT_YET = {
    "plan": "choosing degrees by predicted time and memory",
    "simulate": "predicting time on the described cluster",
    "inspect": "showing a plan's shards, groups and collectives",
    "fmt": "formatting files",
    "explain": "explaining a diagnostic",
    "init": "writing a starter file",
    "import": "reading Hugging Face configs",
    "weights": "importing and exporting weights",
    "tune": "measuring kernel configurations",
    "calibrate": "measuring a cluster",
    "lsp": "a language server",
}
"""Commands of the design that are not there yet, and what they will do."""


def _not_yet(name: str) -> None:
    def command(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        message = f"`moec {name}`: {NOT_YET[name]}"
        raise DiagnosticError([diagnose("MOE0202", None, message, help="the README's table says what works today")])

    app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})(command)


for _name in NOT_YET:
    _not_yet(_name)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"moec {__version__}")
        raise typer.Exit


def _lets(lets: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in lets or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--let wants NAME=VALUE, not {text!r}")
        pairs[name.strip()] = value.strip()
    return pairs


def _require(option: str, value: str | None, allowed: Iterable[str]) -> None:
    choices = list(allowed)
    if value is not None and value not in choices:
        raise typer.BadParameter(f"{option} is one of {', '.join(choices)}, not {value!r}")


def _show(diagnostics: Iterable[Diagnostic], style: str) -> None:
    found = list(diagnostics)
    if found:
        color = style == "full" and sys.stderr.isatty() and "NO_COLOR" not in os.environ
        print(render(found, style, color=color).rstrip("\n"), file=sys.stderr)


def main() -> NoReturn:
    """The entry point: runs the command and turns every outcome into an exit code."""
    style = next((a.split("=", 1)[1] for a in sys.argv if a.startswith("--format=")), "full")
    if "--format" in sys.argv[:-1]:
        style = sys.argv[sys.argv.index("--format") + 1]
    try:
        app(standalone_mode=True)
    except DiagnosticError as error:
        _show(error.diagnostics, style if style in STYLES else "full")
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our stdout has gone (`moec compile --emit=ir … | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception:  # noqa: BLE001  (the last resort: whatever reaches this is ours, and must say so)
        print(traceback.format_exc(), file=sys.stderr)
        where = f"moec {__version__}, Python {platform.python_version()}, {platform.platform()}"
        print(f"This is a bug in moec. Please report it with the text above, the file, and: {where}", file=sys.stderr)
        sys.exit(3)
    sys.exit(0)

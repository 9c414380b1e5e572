"""The command line. It has no semantics: only the file and `--let` change a plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from moec import __version__
from moec.commands.check import show
from moec.commands.checkpoint import app as checkpoint_app
from moec.commands.weights import app as weights_app
from moec.grammar.diagnostics import STYLES, DiagnosticError, diagnose

app = typer.Typer(
    help="The compiler for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Lets = Annotated[list[str] | None, typer.Option("--let", metavar="NAME=VALUE", help="Override a `let` of the file.")]
Format = Annotated[str, typer.Option("--format", help="Format of diagnostics: full, concise, json or github.")]


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="`.moe` files.")],
    lets: Lets = None,
    format: Format = "full",
    fix: Annotated[bool, typer.Option("--fix", help="First apply unambiguous fixes to the files.")] = False,
) -> None:
    """Report every error in files. Never imports torch."""
    from moec.commands.check import run

    _require("--format", format, STYLES)
    raise typer.Exit(run(files, _lets(lets), format, fix))


@app.command()
def fmt(
    files: Annotated[list[Path], typer.Argument(help="`.moe` files; `-` reads stdin and writes stdout.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a file would change.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write nothing; print what would change.")] = False,
) -> None:
    """Format files in the standard layout. Keeps comments and meaning."""
    from moec.commands.fmt import run

    raise typer.Exit(run(files, check, diff))


@app.command()
def explain(
    subject: Annotated[str, typer.Argument(metavar="CODE|WORD", help="MOE0311, topk, kv_heads, …")],
) -> None:
    """Explain a diagnostic and its fix, or a word of the language and its arguments."""
    from moec.commands.explain import explain as run

    print(run(subject), end="")


@app.command()
def init(
    file: Annotated[
        Path | None, typer.Argument(help="The file to write; it must not exist. Default: model.moe, or NAME.moe.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="Start from this model of the library.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Write nothing; list the library's models.")] = False,
) -> None:
    """Write a commented starter file, or a file that starts from a model of the library."""
    if show_list:
        from moec.commands.library import listing

        if file or model:
            raise typer.BadParameter("--list writes nothing: leave out FILE and --from")
        print("\n".join(listing()))
        return
    from moec.commands.init import run

    run(file, model)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A `.moe` file, or a plan folder.")],
    lets: Lets = None,
    format: Format = "full",
    params: Annotated[
        bool, typer.Option("--params", help="Count parameters: total, active per token, per layer, per rank.")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Of a plan: this rank's parts and groups.")] = None,
    graph: Annotated[str | None, typer.Option(help="Of a plan: its ops as `mermaid` or `dot`.")] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Of a plan: its compiled kernels and the limit of each.")
    ] = False,
    source: Annotated[bool, typer.Option("--source", help="With --kernels: print their source only.")] = False,
    fx: Annotated[bool, typer.Option("--fx", help="Of a plan: its torch.fx graphs as readable Python.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Of a plan: a rank's memory over a training step, and its peak.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="With --memory: write it as a plot.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --kernels, --memory or --params: print it as JSON.")
    ] = False,
) -> None:
    """Show every value of a file with its source line, or a plan's groups and shards, or count parameters."""
    _require("--format", format, STYLES)
    _require("--graph", graph, ("mermaid", "dot"))
    if source and not kernels:
        raise typer.BadParameter("--source needs --kernels")
    if plot and not memory:
        raise typer.BadParameter("--svg needs --memory")
    if as_json and (source or not (kernels or memory or params)):
        raise typer.BadParameter("--json needs --kernels (without --source), --memory or --params")
    views = {"--rank": rank is not None, "--graph": graph is not None}
    views |= {"--kernels": kernels, "--fx": fx, "--memory": memory, "--params": params}
    _require_one_view(path, views)
    if lets and path.is_dir():
        raise typer.BadParameter("--let needs a file; a plan was compiled with values of its own")
    if params:
        from moec.commands.inspect_params import run as run_params

        show(run_params(path, _lets(lets), as_json), format)
    elif kernels:
        _show_kernels(path, source, as_json)
    elif fx:
        from moec.commands.inspect_fx import inspect_fx

        print(inspect_fx(path), end="")
    elif memory:
        _show_memory(path, plot, as_json)
    elif path.is_dir():
        from moec.commands.inspect_plan import inspect_plan

        print(inspect_plan(path, rank, graph))
    else:
        from moec.commands.inspect import run

        show(run(path, _lets(lets)), format)


def _require_one_view(path: Path, views: Mapping[str, bool]) -> None:
    """Raises `BadParameter` for two views of a plan, or a view of a file; `views` says which options are given."""
    asked = [option for option, is_asked in views.items() if is_asked]
    if asked == ["--rank", "--memory"]:
        raise typer.BadParameter("--memory is of the rank with the most rows: leave out --rank, or --memory")
    if len(asked) > 1:
        raise typer.BadParameter(f"{' and '.join(asked)}: one view at a time")
    if asked and asked != ["--params"] and not path.is_dir():
        raise typer.BadParameter(f"{asked[0]} needs a plan, not a file")


def _show_kernels(path: Path, source: bool, as_json: bool) -> None:
    from moec.commands.inspect_kernels import inspect_kernels, inspect_sources, kernels_json

    if as_json:
        print(json.dumps(kernels_json(path)))
    else:
        print(inspect_sources(path) if source else inspect_kernels(path))


def _show_memory(path: Path, plot: Path | None, as_json: bool) -> None:
    from moec.commands.inspect_memory import inspect_memory, memory_json, write_plot

    if plot:
        write_plot(path, plot)
        typer.echo(f"wrote {plot}", err=as_json)  # stdout is the JSON
    if as_json or not plot:
        print(json.dumps(memory_json(path)) if as_json else inspect_memory(path))


@app.command()
def compile(
    file: Annotated[Path, typer.Argument(help="A `.moe` file.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of the plan; default: FILE's name.plan.")
    ] = None,
    lets: Lets = None,
    format: Format = "full",
    emit: Annotated[
        str | None, typer.Option(help="Print ast, spec, ir, placed, fx or kernels, and write no plan.")
    ] = None,
    stop_after: Annotated[str | None, typer.Option(help="Stop after this pass (with --emit=ir).")] = None,
    print_ir_after: Annotated[
        str | None, typer.Option(help="Print the Program after a pass: its name, `all`, or `changed`.")
    ] = None,
    time_passes: Annotated[bool, typer.Option("--time-passes", help="Print the time of each pass.")] = False,
) -> None:
    """Turn a `.moe` file into a plan. Imports torch only for `--emit=fx`."""
    from moec.commands.compile import PASS_CHOICES, STAGES, run

    _require("--format", format, STYLES)
    _require("--emit", emit, STAGES)
    _require("--stop-after", stop_after, PASS_CHOICES[:-2])
    _require("--print-ir-after", print_ir_after, PASS_CHOICES)
    if stop_after and emit not in ("ir", "placed"):
        raise typer.BadParameter("--stop-after needs --emit=ir: it makes no plan")
    warnings = run(file, output, _lets(lets), emit, stop_after, print_ir_after, time_passes)
    show(warnings, format)


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(help="A plan folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    trust_nothing: Annotated[
        bool, typer.Option("--trust-nothing", help="First compile the plan's Spec again and compare.")
    ] = False,
    scale: Annotated[
        bool, typer.Option("--scale", help="Use toy widths; default: only for plans too large for this machine.")
    ] = False,
) -> None:
    """Prove a plan equal to the unsharded model or layer: all ranks in one process, forward, gradients, one step."""
    from moec.commands.verify import print_report
    from moec.driver import load
    from moec.driver import verify as run

    report = run(load(plan, trust_nothing=trust_nothing), scale=scale or None)
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
        bool, typer.Option("--trust-nothing", help="Compile the plan's Spec again and compare.")
    ] = False,
) -> None:
    """Check that a plan is complete and valid. Never imports torch."""
    from moec.driver import load as run

    loaded = run(plan, trust_nothing=trust_nothing)
    ranks = "1 rank" if loaded.world_size == 1 else f"{loaded.world_size} ranks"
    print(f"{plan}: {loaded.name}, {ranks}, {len(loaded.parameters)} parameters, valid")


@app.command()
def tune(
    plan: Annotated[Path, typer.Argument(help="A plan folder.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder of the tuned plan; default: PLAN itself.")
    ] = None,
    most: Annotated[
        int | None, typer.Option(min=1, help="Tiles to try for each product and height of tiles; default: 12.")
    ] = None,
) -> None:
    """Measure the fastest tiles of a plan's kernels on this machine's device, and store them in the plan."""
    from moec.commands.tune import run

    run(plan, output, most)


app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(weights_app, name="weights")
imports = typer.Typer(help="Make a `.moe` file of a model described elsewhere.", no_args_is_help=True)
app.add_typer(imports, name="import")


@imports.command("hf")
def import_hf(
    source: Annotated[Path, typer.Argument(metavar="DIR|config.json", help="A model's folder, or its config.json.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; default: stdout.")] = None,
    format: Format = "full",
) -> None:
    """A model of Hugging Face as a `.moe` file. Executes nothing of the folder, and needs no torch."""
    from moec.commands.import_hf import run

    _require("--format", format, STYLES)
    run(source, output, format)


NOT_YET = {
    "plan": "choosing degrees by predicted time and memory",
    "simulate": "predicting time on the described cluster",
    "calibrate": "measuring a cluster",
    "lsp": "a language server",
}
"""Commands that are not built yet, and what they will do."""


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

"""`moec inspect`: views of a file or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click

from moec.cli.command import Command, argument, lets, output_format, path
from moec.cli.completing import FileOrPlan


@click.command(
    cls=Command,
    examples={
        "moec inspect first.moe": "what is set, and where",
        "moec inspect first.moe --all": "the defaults too",
        "moec inspect --params first.moe": "parameters by part",
        "moec inspect first.plan": "meshes, groups and shards",
        "moec inspect --memory first.plan": "the memory of a step",
    },
    documents=(
        "inspect-file",
        "inspect-plan",
        "inspect-rank",
        "inspect-params",
        "inspect-memory",
        "inspect-kernels",
        "inspect-text",
    ),
)
@argument("path", "A `.moe` file, or a plan folder.", type=FileOrPlan(files=True, plans=True))
@lets
@output_format
@click.option("--all", "every", is_flag=True, help="For files: show the defaults too.")
@click.option("--params", is_flag=True, help="Count parameters: total, active per token, per layer, per rank.")
@click.option("--rank", type=int, help="For plans: this rank's parts and groups.")
@click.option("--graph", type=click.Choice(("mermaid", "dot")), help="For plans: the ops as `mermaid` or `dot`.")
@click.option("--kernels", is_flag=True, help="For plans: the compiled kernels and the limit of each.")
@click.option("--source", is_flag=True, help="With --kernels: print their source only.")
@click.option("--fx", is_flag=True, help="For plans: the torch.fx graphs as readable Python.")
@click.option("--memory", is_flag=True, help="For plans: a rank's memory over a training step, and its peak.")
@click.option(
    "--svg", "plot", metavar="FILE", type=path(), help="With --memory: write the memory over the step as an SVG plot."
)
def inspect(
    path: Path,
    lets: dict[str, str],
    style: str,
    every: bool,
    params: bool,
    rank: int | None,
    graph: str | None,
    kernels: bool,
    source: bool,
    fx: bool,
    memory: bool,
    plot: Path | None,
) -> None:
    """Show what a file sets and where, or a plan's groups and shards, or count parameters."""
    from moec.commands.console.other_files import require_moe_file, require_plan
    from moec.commands.console.output import show

    if source and not kernels:
        raise click.UsageError("--source needs --kernels")
    if plot and not memory:
        raise click.UsageError("--svg needs --memory")
    views = {"--rank": rank is not None, "--graph": graph is not None}
    views |= {"--kernels": kernels, "--fx": fx, "--memory": memory, "--params": params}
    require = require_plan if path.is_dir() else require_moe_file
    require(path, "moec inspect")
    _require_one_view(path, views)
    if every and (params or path.is_dir()):
        raise click.UsageError(
            "--all is of the values of a file: leave out --params" if params else "--all needs a file"
        )
    if lets and path.is_dir():
        raise click.UsageError("--let needs a file; a plan was compiled with values of its own")
    if params:
        from moec.commands.inspecting.inspect_params import run as run_params

        show(run_params(path, lets, style), style)
    elif kernels:
        _show_kernels(path, source, style)
    elif fx:
        from moec.commands.inspecting.inspect_fx import inspect_fx

        _show_text("fx", inspect_fx(path, style).rstrip("\n"), style)
    elif memory:
        _show_memory(path, plot, style)
    elif graph:
        from moec.commands.inspecting.inspect_picture import picture_of

        _show_text("graph", picture_of(path, graph, style), style)
    elif path.is_dir():
        from moec.commands.inspecting.inspect_plan import run as run_plan

        run_plan(path, rank, style)
    else:
        from moec.commands.inspecting.inspect import run

        show(run(path, lets, style, all=every), style)


def _require_one_view(path: Path, views: Mapping[str, bool]) -> None:
    """Raises `UsageError` for two views of a plan, or a view of a file; `views` says which options are given."""
    views_given = [option for option, is_asked in views.items() if is_asked]
    if views_given == ["--rank", "--memory"]:
        raise click.UsageError("--memory is of the rank with the most rows: leave out --rank, or --memory")
    if len(views_given) > 1:
        raise click.UsageError(f"{' and '.join(views_given)}: one view at a time")
    if views_given and views_given != ["--params"] and not path.is_dir():
        raise click.UsageError(f"{views_given[0]} needs a plan, not a file")


def _show_text(view: Literal["graph", "fx", "source"], text: str, style: str) -> None:
    from moec.commands.console.documents import InspectedText
    from moec.commands.console.output import emit

    emit(style, lambda: [text], lambda: InspectedText(view=view, text=text))


def _show_kernels(path: Path, source: bool, style: str) -> None:
    from moec.commands.inspecting.inspect_kernels import inspect_sources, run

    if source:
        _show_text("source", inspect_sources(path), style)
    else:
        run(path, style)


def _show_memory(path: Path, plot: Path | None, style: str) -> None:
    from moec.commands.inspecting.inspect_memory import run, write_plot

    if plot:
        write_plot(path, plot)
        click.echo(f"wrote {plot}", err=style == "json")  # stdout is the JSON
    if style == "json" or not plot:
        run(path, style)

"""Commands about machines: `launch`, `doctor`."""

from __future__ import annotations

from pathlib import Path
from shlex import join, quote
from typing import Any

import click

from moec.cli.command import Command, argument, output_format, path
from moec.cli.completing import FileOrPlan

WAYS = {"--run": ("torchrun",), "--host": ("torchrun",), "--name": ("slurm", "k8s"), "--image": ("k8s",)}
"""Options that apply only to some ways of starting, with these ways."""


class LaunchCommand(Command):
    """Reads `-h` only as a word of its own: click would find it in `-hidden`, an option of the script."""

    def make_parser(self, ctx: click.Context) -> Any:
        """The parser, in which short options are matched whole, as long ones are."""
        parser = super().make_parser(ctx)
        parser._long_opt |= parser._short_opt
        parser._short_opt.clear()
        return parser


@click.command(
    cls=LaunchCommand,
    context_settings={"ignore_unknown_options": True},
    examples={
        "moec launch first.plan train.py": "the torchrun command of the plan's cluster",
        "moec launch first.plan train.py --slurm > job.sh": "a script for sbatch",
        "moec launch first.plan train.py --run": "starts the ranks on this machine",
    },
    fails="the plan cannot be loaded, or its ranks do not fit the nodes; with --run the exit code is the script's",
    documents=("launch",),
)
@argument("plan", "A plan folder.", type=FileOrPlan(plans=True))
@argument(
    "script",
    "The training script and its arguments; default: train.py. "
    "Put `--` before options of the script whose names `moec launch` has too.",
    nargs=-1,
    metavar="[SCRIPT [ARGS]...]",
)
@output_format
@click.option("--torchrun", is_flag=True, help="Print the command (default).")
@click.option("--slurm", is_flag=True, help="Print a batch script for Slurm.")
@click.option("--k8s", is_flag=True, help="Print a manifest for Kubernetes with Kubeflow's PyTorchJob.")
@click.option("--run", "starts", is_flag=True, help="Start the ranks, all on this machine.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes; default: as the plan's cluster has them.")
@click.option(
    "--per-node", type=click.IntRange(min=1), help="Ranks of each node; default: as the plan's cluster has them."
)
@click.option("--host", help="Name or address of the first node; default: the variable HOST.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port on the first node where ranks meet; default: 29500, for --slurm one by the job's number.",
)
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, help="How often ranks are started again; default: 0."
)
@click.option("--name", help="Name of the job, for --slurm and --k8s; default: the model's.")
@click.option("--image", help="Container image, for --k8s.")
@click.option("--logs", type=path(), help="Folder for what ranks write to stderr, for --run.")
def launch(
    plan: Path,
    script: tuple[str, ...],
    style: str,
    torchrun: bool,
    slurm: bool,
    k8s: bool,
    starts: bool,
    nodes: int | None,
    per_node: int | None,
    host: str | None,
    port: int | None,
    max_restarts: int,
    name: str | None,
    image: str | None,
    logs: Path | None,
) -> None:
    """Print how to start a plan's ranks: the torchrun command, a Slurm script or a Kubernetes manifest."""
    if script and script[0].startswith("-"):
        if script[0].strip("-").replace("_", "-").partition("=")[0] in ("nproc-per-node", "np", "n", "num-gpus"):
            raise click.UsageError(f"no option {script[0]}: the plan has its ranks, and `--per-node` those of a node")
        raise click.UsageError(f"no option {script[0]}: options of the script go after its name")
    way = _way(torchrun=torchrun, slurm=slurm, k8s=k8s)
    _require_fitting({"--run": starts, "--host": host, "--name": name, "--image": image}, way)
    if logs is not None and not starts:
        raise click.UsageError("--logs needs --run. An option of the script goes after `--`.")
    if starts and (style == "json" or host or port):
        raise click.UsageError(
            "--run prints what the script prints, and takes a free port: leave out --json, --host and --port"
        )
    from moec.commands.console.given_plan import given_plan
    from moec.commands.launching.launch import make_launch

    _require_no_processes(plan, script)
    _require_plan_first(plan, script, "--run" if starts else f"--{way}")
    chosen = make_launch(
        given_plan(plan, style),
        plan,
        script,
        nodes=nodes,
        per_node=per_node,
        host=host,
        port=port,
        max_restarts=max_restarts,
        name=name,
        image=image,
    )
    if way == "torchrun" and chosen.hosts.nodes == 1 and (host or port):
        message = "--host and --port are for several nodes; on one node torchrun takes a free port"
        raise click.UsageError(f"{message}. An option of the script goes after `--`.")
    if starts:
        from moec.commands.launching.launch_run import run

        raise SystemExit(run(chosen, logs))
    from moec.commands.launching.launch_print import print_launch

    print_launch(chosen, way, style)


def _require_no_processes(plan: Path, script: tuple[str, ...]) -> None:
    """Raises `UsageError` for torchrun's number of processes after the script, which would get it as an argument."""
    if any(word.partition("=")[0].replace("_", "-") == "--nproc-per-node" for word in script[1:]):
        raise click.UsageError(f"`{plan}` has its number of ranks: leave --nproc-per-node out")


def _require_plan_first(plan: Path, script: tuple[str, ...], way: str) -> None:
    """Raises `DiagnosticError` for what is no plan: MOE0017 where a plan follows it."""
    from moec.commands.console.other_files import require_plan
    from moec.grammar.diagnostics import DiagnosticError, diagnose
    from moec.grammar.folder_kinds import kind_of

    end = "" if way == "--torchrun" else f" {way}"
    if script and kind_of(plan) != "plan" and kind_of(Path(script[0])) == "plan":
        message = f"`{plan}` is no plan, and the plan comes before the script"
        words = join((script[0], str(plan), *script[1:]))
        raise DiagnosticError([diagnose("MOE0017", None, message, help=f"did you mean `moec launch {words}{end}`?")])
    if plan.suffix == ".py":  # a plan that is not there may follow it
        script = (str(plan), *(script[1:] if script and script[0].endswith((".plan", ".moe")) else script))
    words = "".join(f" {quote(word)}" for word in script).replace("{", "{{").replace("}", "}}")
    require_plan(plan, "moec launch", f"moec launch {{}}{words}{end}")


def _way(**options: bool) -> str:
    """The one way that is given, or torchrun. Raises `UsageError` for two."""
    ways = [way for way, is_given in options.items() if is_given]
    if len(ways) > 1:
        raise click.UsageError(f"--{ways[0]} and --{ways[1]} are two ways to start a plan: give one")
    return ways[0] if ways else "torchrun"


def _require_fitting(options: dict[str, object], way: str) -> None:
    """Raises `UsageError` for an option that has a value and is not for `way`."""
    for option, value in options.items():
        if value and way not in WAYS[option]:
            raise click.UsageError(f"{option} is not for --{way}. An option of the script goes after `--`.")


@click.command(
    cls=Command,
    examples={
        "moec top run.jsonl": "beside a run that has `job.metrics('run.jsonl')`; Ctrl-C ends it",
        "moec top run.jsonl --once": "the last record, as where the output is no terminal",
    },
    fails="the file cannot be read, or has no record",
    documents=("top",),
)
@argument("run", "The file of JSON lines.", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print the last record and end, as where the output is no terminal.")
@output_format
def top(run: Path, once: bool, style: str) -> None:
    """Show the figures of a run, by layers, from the JSON lines that `job.metrics` writes; again every second."""
    from moec.commands.top import run as show

    show(run, style, once=once)


@click.command(
    cls=Command,
    examples={
        "moec doctor": "on every node, before a first run",
    },
    fails="training cannot work here",
    documents=("doctor",),
)
@output_format
def doctor(style: str) -> None:
    """Show what is installed here, what training would use, and what is missing. Works without torch."""
    from moec.commands.doctor import run

    raise SystemExit(run(style))

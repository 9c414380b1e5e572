"""`moec checkpoint inspect|verify|convert`. None of them imports torch."""

from __future__ import annotations

from pathlib import Path

import click

from moec.cli.command import Group, argument, output_format, path


@click.group(cls=Group)
def checkpoint() -> None:
    """Look into checkpoints, check their digests, convert them. Needs no torch."""


@checkpoint.command(
    examples={
        "moec checkpoint inspect checkpoints/100": "its tensors, step and ranks",
        "moec checkpoint inspect checkpoints": "a folder of checkpoints, newest first",
    },
    fails="it is no checkpoint, or is not complete",
    documents=("checkpoint-inspect", "checkpoint-inspect-folder"),
)
@argument("folder", "The folder of a checkpoint, or a folder of such folders.", metavar="CHECKPOINT", type=path())
@output_format
def inspect(folder: Path, style: str) -> None:
    """Show the tensors of a checkpoint, its step, optimizer, extras and ranks; or list a folder of checkpoints."""
    from moec.commands.checkpoints.checkpoint import inspect as run

    run(folder, style)


@checkpoint.command(
    examples={
        "moec checkpoint verify checkpoints/100": "reads every byte",
    },
    fails="a tensor is damaged",
    documents=("checkpoint-verify",),
)
@argument("folder", "The folder of a checkpoint.", metavar="CHECKPOINT", type=path())
@output_format
def verify(folder: Path, style: str) -> None:
    """Read all of a checkpoint, compare every digest, and name every damaged tensor."""
    from moec.commands.checkpoints.checkpoint import verify as run

    raise SystemExit(run(folder, style))


@checkpoint.command(
    examples={
        "moec checkpoint convert checkpoints/100 -o model.safetensors": "one file",
        "moec checkpoint convert model.safetensors --plan first.plan -o checkpoints/0": "and back",
    },
    fails="the source is damaged, or the output exists",
    documents=("checkpoint-convert",),
)
@argument("source", "The folder of a checkpoint, or a safetensors file.", type=path())
@click.option("-o", "--output", required=True, type=path(), help="The new file, or the new folder; must not exist.")
@click.option(
    "--plan",
    type=path(),
    help="For a safetensors file: any plan of its model. Other plans of the model load the checkpoint too.",
)
@output_format
def convert(source: Path, output: Path, plan: Path | None, style: str) -> None:
    """Write a checkpoint's parameters and states to one safetensors file, or such a file to a checkpoint."""
    from moec.commands.checkpoints.checkpoint import convert as run

    if plan is not None and not source.is_file():
        raise click.UsageError("--plan is for a safetensors file; a checkpoint needs none")
    if plan is None and source.is_file():
        raise click.UsageError("a safetensors file needs --plan, which names the tensors of its model")
    run(source, output, plan, style)

"""`moec weights import|export|upcycle`: weights of Hugging Face to a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path

import click

from moec.cli.command import Function, Group, argument, output_format, path


@click.group(cls=Group)
def weights() -> None:
    """Weights of Hugging Face to a checkpoint, and back."""


def _plan(function: Function) -> Function:
    return click.option("--plan", type=path(), help="A plan of the model.")(function)


@weights.command(
    "import",
    examples={
        "moec weights import Mixtral-8x7B-v0.1 checkpoints/0": "any plan of the model loads it",
    },
    documents=("weights-import",),
)
@argument("folder", "A folder with config.json and safetensors files.", metavar="DIR", type=path())
@argument("checkpoint", "The new folder; it must not exist.", type=path())
@_plan
@output_format
def import_(folder: Path, checkpoint: Path, plan: Path | None, style: str) -> None:
    """Write the weights of a folder as a checkpoint, which any plan of the model loads. No pickle is opened."""
    from moec.commands.checkpoints.weights import import_ as run

    run(folder, checkpoint, plan, style)


@weights.command(
    examples={
        "moec weights export checkpoints/100 trained --like Mixtral-8x7B-v0.1": "a folder that transformers loads",
    },
    documents=("weights-export",),
)
@argument("checkpoint", "A checkpoint, imported or trained.", type=path())
@argument("folder", "The new folder; it must not exist.", metavar="DIR", type=path())
@click.option(
    "--like",
    metavar="DIR",
    type=path(),
    help="A folder of the original model: its config, tokenizer, dtypes and file layout are copied.",
)
@_plan
@click.option("--architecture", metavar="MODEL_TYPE", help="With --plan: the architecture, such as mixtral.")
@output_format
def export(
    checkpoint: Path, folder: Path, like: Path | None, plan: Path | None, architecture: str | None, style: str
) -> None:
    """Write a checkpoint's model as a folder that transformers loads."""
    from moec.commands.checkpoints.weights import export as run

    if architecture and (plan is None or like is not None):
        raise click.UsageError("--architecture needs --plan, and no --like, whose config says it")
    run(checkpoint, folder, like, plan, architecture, style)


@weights.command(
    examples={
        "moec weights upcycle Llama-3.1-8B mixture.moe -o checkpoints/0": "every expert begins as the feed-forward",
    },
    documents=("weights-upcycle",),
)
@argument("dense", "A folder of a dense model, or a checkpoint of one.", type=path())
@argument("model", "The same model with `moe` in place of `ffn`.", metavar="MODEL.moe", type=path())
@click.option("-o", "--output", required=True, type=path(), help="The new checkpoint; it must not exist.")
@click.option(
    "--noise", type=float, default=0.0, show_default=True, help="Standard deviation of noise on the experts' weights."
)
@click.option("--split", is_flag=True, help="Experts narrower than the feed-forward take a slice of it each.")
@click.option(
    "--drop",
    type=float,
    default=0.0,
    show_default=True,
    help="Fraction of each expert's hidden units that start from new random values.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the noise, the dropped units and the new routers.",
)
@output_format
def upcycle(
    dense: Path, model: Path, output: Path, noise: float, split: bool, drop: float, seed: int, style: str
) -> None:
    """Write a dense model's weights as a checkpoint of a mixture: every expert begins as the dense feed-forward."""
    from moec.commands.checkpoints.weights import upcycle as run

    run(dense, model, output, noise, split, drop, seed, style)

"""`moec weights import|export|upcycle`: weights of Hugging Face to a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moec import __version__
from moec.commands.check import show
from moec.commands.checkpoint import progress_of_bytes
from moec.commands.summary import amount_of_bytes, count

app = typer.Typer(
    help="Weights of Hugging Face to a checkpoint, and back.", no_args_is_help=True, rich_markup_mode=None
)
Plan = Annotated[Path | None, typer.Option(help="A plan of the model.")]


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with config.json and safetensors files.")],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The new folder; it must not exist.")],
    plan: Plan = None,
) -> None:
    """Write the weights of a folder as a checkpoint, which any plan of the model loads. No pickle is opened."""
    from moec.driver import load
    from moec.runtime.huggingface.checkpoints import import_weights

    with progress_of_bytes() as advance:
        done = import_weights(folder, checkpoint, __version__, load(plan) if plan else None, advance)
    show(done.notes, "full")
    print(f"wrote {checkpoint}, {count(done.num_tensors, 'tensor')}, {amount_of_bytes(done.num_bytes)}")
    _say_left_out(done.left_out)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, imported or trained.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder; it must not exist.")],
    like: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder whose config, tokenizer, dtypes and files are to be as in it."),
    ] = None,
    plan: Plan = None,
    architecture: Annotated[
        str | None, typer.Option(metavar="MODEL_TYPE", help="With --plan: the architecture, such as mixtral.")
    ] = None,
) -> None:
    """Write a checkpoint's model as a folder that transformers loads."""
    from moec.driver import load
    from moec.runtime.huggingface.checkpoints import export_weights

    if architecture and (plan is None or like is not None):
        raise typer.BadParameter("--architecture needs --plan, and no --like, whose config says it")
    opened = load(plan) if plan else None
    with progress_of_bytes() as advance:
        done = export_weights(
            checkpoint, folder, __version__, like=like, plan=opened, model_type=architecture, progress=advance
        )
    print(f"wrote {folder}, {count(done.num_tensors, 'tensor')}, {amount_of_bytes(done.num_bytes)}")
    _say_left_out(done.left_out)


@app.command()
def upcycle(
    dense: Annotated[Path, typer.Argument(metavar="DENSE", help="A folder of a dense model, or a checkpoint of one.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL.moe", help="The same model with `moe` in place of `ffn`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The new checkpoint; it must not exist.")],
    noise: Annotated[float, typer.Option(help="Standard deviation of noise on the experts' weights.")] = 0.0,
    split: Annotated[
        bool, typer.Option("--split", help="Experts narrower than the feed-forward take a slice of it each.")
    ] = False,
    drop: Annotated[float, typer.Option(help="Part of each expert's hidden units that begins anew.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of noise, of dropped units, and of the new routers.")] = 0,
) -> None:
    """Write a dense model's weights as a checkpoint of a mixture: every expert begins as the dense feed-forward."""
    from moec.driver import to_spec
    from moec.runtime.huggingface.upcycle import Upcycling
    from moec.runtime.huggingface.upcycle import upcycle as run

    done = run(dense, to_spec(model), output, __version__, Upcycling(noise, split, drop, seed))
    show(done.notes, "full")
    print(f"wrote {output}, {count(done.num_tensors, 'tensor')}, {amount_of_bytes(done.num_bytes)}")


def _say_left_out(names: tuple[str, ...]) -> None:
    """Names the tensors that the model does not use."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(f"left out, because the model does not use them: {', '.join(names[:3])}{more}")

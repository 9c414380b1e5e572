"""`moec weights import|export|upcycle`: weights of Hugging Face to a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moec import __version__
from moec.commands.console.documents import WrittenWeights
from moec.commands.console.output import emit, show
from moec.commands.console.progress import progress
from moec.grammar.amounts import amount_of_bytes, count
from moec.subject import require_plan_folder

if TYPE_CHECKING:
    from moec.runtime.huggingface.checkpoints import Transferred


def import_(folder: Path, checkpoint: Path, plan: Path | None, style: str) -> None:
    """Writes the weights of a folder as a checkpoint, which any plan of the model loads. No pickle is opened."""
    from moec.driver import load
    from moec.runtime.huggingface.checkpoints import import_weights

    if plan is not None:
        require_plan_folder(plan, "--plan", "moec weights import … --plan {}")
    with progress("reading weights", counts_bytes=True) as bar:
        transferred = import_weights(folder, checkpoint, __version__, load(plan) if plan else None, bar.advance)
    show(transferred.notes, style)
    _say(transferred, checkpoint, style)


def export(
    checkpoint: Path, folder: Path, like: Path | None, plan: Path | None, architecture: str | None, style: str
) -> None:
    """Writes a checkpoint's model as a folder that transformers loads."""
    from moec.driver import load
    from moec.runtime.huggingface.checkpoints import export_weights

    if plan is not None:
        require_plan_folder(plan, "--plan", "moec weights export … --plan {}")
    opened = load(plan) if plan else None
    with progress("writing weights", counts_bytes=True) as bar:
        transferred = export_weights(
            checkpoint, folder, __version__, like=like, plan=opened, model_type=architecture, advance=bar.advance
        )
    _say(transferred, folder, style)


def upcycle(
    dense: Path, model: Path, output: Path, noise: float, split: bool, drop: float, seed: int, style: str
) -> None:
    """Writes a dense model's weights as a checkpoint of a mixture: every expert begins as the dense feed-forward."""
    from moec.driver import to_spec
    from moec.runtime.huggingface.upcycle import Upcycling
    from moec.runtime.huggingface.upcycle import upcycle as run

    with progress("writing weights", counts_bytes=True) as bar:
        transferred = run(dense, to_spec(model), output, __version__, Upcycling(noise, split, drop, seed), bar.advance)
    show(transferred.notes, style)
    _say(transferred, output, style)


def _say(transferred: Transferred, output: Path, style: str) -> None:
    """Prints what was written, and which tensors the model does not use."""
    written = f"wrote {output}, {count(transferred.num_tensors, 'tensor')}, {amount_of_bytes(transferred.num_bytes)}"
    names = transferred.left_out
    ending = f" and {len(names) - 3} more" if len(names) > 3 else ""
    left_out = f"left out, because the model does not use them: {', '.join(names[:3])}{ending}"
    emit(
        style,
        lambda: [written, left_out] if names else [written],
        lambda: WrittenWeights(
            output=str(output), tensors=transferred.num_tensors, bytes=transferred.num_bytes, left_out=list(names)
        ),
    )

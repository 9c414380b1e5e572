"""`moec weights import|export|upcycle`: weights of Hugging Face to a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path

from moec import __version__
from moec.commands.check import show
from moec.commands.checkpoint import progress_of_bytes
from moec.commands.summary import amount_of_bytes, count


def import_(folder: Path, checkpoint: Path, plan: Path | None) -> None:
    """Writes the weights of a folder as a checkpoint, which any plan of the model loads. No pickle is opened."""
    from moec.driver import load
    from moec.runtime.huggingface.checkpoints import import_weights

    with progress_of_bytes() as advance:
        done = import_weights(folder, checkpoint, __version__, load(plan) if plan else None, advance)
    show(done.notes, "full")
    print(f"wrote {checkpoint}, {count(done.num_tensors, 'tensor')}, {amount_of_bytes(done.num_bytes)}")
    _say_left_out(done.left_out)


def export(checkpoint: Path, folder: Path, like: Path | None, plan: Path | None, architecture: str | None) -> None:
    """Writes a checkpoint's model as a folder that transformers loads."""
    from moec.driver import load
    from moec.runtime.huggingface.checkpoints import export_weights

    opened = load(plan) if plan else None
    with progress_of_bytes() as advance:
        done = export_weights(
            checkpoint, folder, __version__, like=like, plan=opened, model_type=architecture, progress=advance
        )
    print(f"wrote {folder}, {count(done.num_tensors, 'tensor')}, {amount_of_bytes(done.num_bytes)}")
    _say_left_out(done.left_out)


def upcycle(dense: Path, model: Path, output: Path, noise: float, split: bool, drop: float, seed: int) -> None:
    """Writes a dense model's weights as a checkpoint of a mixture: every expert begins as the dense feed-forward."""
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

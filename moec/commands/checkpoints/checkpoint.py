"""`moec checkpoint inspect|verify|convert`. None of them imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moec import __version__
from moec.commands.checkpoints import checkpoint_list
from moec.commands.checkpoints.checkpoint_document import (
    CheckpointDocument,
    CheckpointsDocument,
    DigestsDocument,
    ExtraDocument,
    TensorDocument,
)
from moec.commands.console.documents import WrittenWeights
from moec.commands.console.output import emit
from moec.commands.console.progress import progress
from moec.commands.console.table import table
from moec.grammar.amounts import amount_of_bytes, count
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.folder_kinds import command_for, in_words, kind_of
from moec.runtime.checkpoint.format.index import Entry
from moec.runtime.checkpoint.format.reading import Checkpoint, damages
from moec.subject import require_plan_folder

COLUMNS = "tensor", "dtype", "shape", "pieces", "bytes"
NUMBERS = 3, 4
"""Columns of numbers."""


def inspect(checkpoint: Path, style: str) -> None:
    """Prints the contents of a checkpoint, or a list of the checkpoints of a folder. Raises `DiagnosticError`."""
    checkpoints = checkpoint_list.checkpoints_of(checkpoint)
    if checkpoints:
        emit(
            style,
            lambda: checkpoint_list.lines(checkpoint, checkpoints),
            lambda: CheckpointsDocument(checkpoints=checkpoints),
        )
    else:
        _require_checkpoint(checkpoint)
        opened = Checkpoint(checkpoint)
        emit(style, lambda: _lines(opened), lambda: _as_json(opened))


def verify(checkpoint: Path, style: str) -> int:
    """Compares every digest and prints the damaged tensors; returns the exit status. Raises `DiagnosticError`."""
    _require_checkpoint(checkpoint)
    opened = Checkpoint(checkpoint)
    with progress("reading the checkpoint", sum(opened.head.shard_bytes), counts_bytes=True) as bar:
        damage_lines = list(damages(opened, bar.advance))
    tensors, num_bytes = len(opened.index.tensors), sum(opened.head.shard_bytes)
    success_line = f"{checkpoint}: {count(tensors, 'tensor')}, {amount_of_bytes(num_bytes)}, every digest matches"
    emit(
        style,
        lambda: [*damage_lines, f"{checkpoint}: damaged"] if damage_lines else [success_line],
        lambda: DigestsDocument(ok=not damage_lines, tensors=tensors, damages=damage_lines),
    )
    return 1 if damage_lines else 0


def _require_checkpoint(folder: Path) -> None:
    """Raises `DiagnosticError` MOE0800 for a folder that is known to be something else."""
    kind = kind_of(folder)
    if kind not in (None, "checkpoint"):
        message = f"`{folder}` is {in_words(kind)}"
        raise DiagnosticError([diagnose("MOE0800", None, message, help=command_for(kind, folder))])


def convert(source: Path, output: Path, plan: Path | None, style: str) -> None:
    """Writes the checkpoint `source` as a safetensors file, or the file `source` of `plan`'s model as a checkpoint."""
    from moec.runtime.checkpoint.convert import from_safetensors, to_safetensors

    opened = None
    if plan is None:
        opened = Checkpoint(source)
        with progress("converting", counts_bytes=True) as bar:
            num_bytes = to_safetensors(opened, output, bar.advance)
    else:
        from moec.driver import load

        require_plan_folder(plan, "--plan", "moec checkpoint convert … --plan {}")
        with progress("converting", counts_bytes=True) as bar:
            num_bytes = from_safetensors(source, output, load(plan), __version__, bar.advance)
    left_out = list(_left_out(opened)) if opened else []
    emit(
        style,
        lambda: [
            f"wrote {output}, {amount_of_bytes(num_bytes)}",
            *([f"left out: {', '.join(left_out)}"] if opened else []),
        ],
        lambda: WrittenWeights(output=str(output), tensors=None, bytes=num_bytes, left_out=left_out),
    )


def _left_out(checkpoint: Checkpoint) -> Iterator[str]:
    """The parts of a checkpoint that `convert` does not write."""
    from moec.passes.ir import SEED

    yield f"step {checkpoint.head.step}"
    if (seed := checkpoint.index.settings.get(SEED.name)) is not None:
        yield f"seed {seed}"
    yield "random states"
    if checkpoint.head.optimizer:
        yield f"optimizer ({checkpoint.head.optimizer})"
    if checkpoint.index.extras:
        yield f"extras ({', '.join(checkpoint.index.extras)})"


def _lines(checkpoint: Checkpoint) -> Iterator[str]:
    head, index = checkpoint.head, checkpoint.index
    pieces = sum(len(entry.files) for entry in index.tensors.values())
    totals = f"{count(len(index.tensors), 'tensor')}, {count(pieces, 'piece')}"
    yield f"{checkpoint.path}: {head.model}, step {head.step}, saved by moec {head.moec}"
    yield ""
    yield f"  saved on   {count(head.world_size, 'rank')}" + "".join(_degrees(head.degrees))
    if head.run:
        yield f"  run        {head.run}"
    yield f"  optimizer  {head.optimizer or 'none'}"
    yield f"  extras     {', '.join(_extras(checkpoint)) or 'none'}"
    yield f"  total      {totals}, {amount_of_bytes(sum(head.shard_bytes))} in {count(head.world_size, 'shard')}"
    yield ""
    rows = [COLUMNS, *(_row(name, entry) for name, entry in sorted(index.tensors.items()))]
    yield from table(rows, NUMBERS)


def _row(name: str, entry: Entry) -> tuple[str, ...]:
    shape = " × ".join(map(str, entry.shape)) or "scalar"
    return name, entry.dtype, shape, str(len(entry.files)), f"{entry.num_bytes:,}"


def _degrees(degrees: dict[str, dict[str, int]]) -> Iterator[str]:
    for mesh, axes in degrees.items():
        wide = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        if wide:
            yield f"; {mesh}: {wide}"


def _extras(checkpoint: Checkpoint) -> Iterator[str]:
    for name, extra in checkpoint.index.extras.items():
        notes = ["state"] if extra.loads else []
        notes += [f"of each of {len(extra.copies)} data ranks"] if len(extra.copies) > 1 else []
        yield name + (f" ({', '.join(notes)})" if notes else "")


def _as_json(checkpoint: Checkpoint) -> CheckpointDocument:
    head, index = checkpoint.head, checkpoint.index
    return CheckpointDocument(
        format=head.format,
        moec=head.moec,
        model=head.model,
        run=head.run or None,
        step=head.step,
        world_size=head.world_size,
        data_size=head.data_size,
        degrees={mesh: dict(axes) for mesh, axes in head.degrees.items()},
        optimizer=head.optimizer,
        bytes=sum(head.shard_bytes),
        extras={name: ExtraDocument(state=bool(e.loads), copies=len(e.copies)) for name, e in index.extras.items()},
        tensors={
            name: TensorDocument(dtype=e.dtype, shape=list(e.shape), pieces=len(e.files), bytes=e.num_bytes)
            for name, e in index.tensors.items()
        },
    )

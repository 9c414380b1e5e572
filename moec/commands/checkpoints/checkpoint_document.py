"""The JSON documents of `moec checkpoint`."""

from __future__ import annotations

from moec.commands.console.output import document


@document
class TensorDocument:
    """A tensor of a checkpoint."""

    dtype: str
    shape: list[int]
    pieces: int
    """How many shards have a part of it."""
    bytes: int


@document
class ExtraDocument:
    """An object of the user's script in a checkpoint."""

    state: bool
    """Whether it is a state that loads back into an object."""
    copies: int
    """How many data ranks saved one."""


@document
class CheckpointDocument:
    """What is in a checkpoint."""

    format: int
    moec: str
    """The version of moec that saved it."""
    model: str
    run: str | None
    """The id of the run that saved it; null in a checkpoint of format 1."""
    step: int
    world_size: int
    """How many ranks saved it."""
    data_size: int
    degrees: dict[str, dict[str, int]]
    """Sizes of the axes, by mesh."""
    optimizer: str | None
    bytes: int
    extras: dict[str, ExtraDocument]
    tensors: dict[str, TensorDocument]


@document
class ListedCheckpoint:
    """A checkpoint of a folder."""

    name: str
    model: str | None
    run: str | None
    step: int | None
    saved: str | None
    """Local time."""
    bytes: int
    fault: str | None
    """Why it is not complete; null where it is."""
    latest: bool
    """Whether it is the one that `job.resume` loads."""


@document
class CheckpointsDocument:
    """A folder of checkpoints, the last saved first."""

    checkpoints: list[ListedCheckpoint]


@document
class DigestsDocument:
    """What `moec checkpoint verify` found."""

    ok: bool
    tensors: int
    damages: list[str]
    """A line for each damaged tensor."""

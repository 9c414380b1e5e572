"""The documents of `moec inspect PLAN`: the whole plan, or one rank of it."""

from __future__ import annotations

from moec.commands.console.output import document


@document
class PlanMesh:
    """A mesh of ranks."""

    name: str
    axes: dict[str, int]
    """The ranks along each axis, the outermost first."""


@document
class BlockCollective:
    """A collective of a block, or a message of a pipeline stage. Bytes are those that a rank sends in a step."""

    of: str
    """The value that it makes, `%rows.1`; or weights, gradients; or guests, as many as there are slots,
    once a step."""
    group: str
    ranks: int
    """How many ranks a communicator of the group has."""
    forward: str | None
    """The collective in forward, or `send` or `receive`; null where only backward communicates."""
    forward_bytes: float
    backward: str | None
    """The collective in backward, or `send` or `receive`; null where only forward communicates."""
    backward_bytes: float
    line: str | None
    """Its line in the `.moe` file."""


@document
class OpWork:
    """What a rank computes, keeps and sends for an op, in the step of one layer."""

    op: str
    """`linear %q`: the op and its first result."""
    forward_flops: float
    backward_flops: float
    kept_bytes: float
    """Kept for backward, of a micro-batch. A tensor that several ops keep counts for the first."""
    sent_bytes: float
    """Forward and backward."""
    line: str | None
    """Its line in the `.moe` file."""


@document
class PlanBlock:
    """A block of the plan: a layer, or several equal ones; or what is in no layer."""

    name: str
    layers: list[int]
    """The numbers of the equal layers; empty for what is in no layer."""
    recompute: str
    """What backward computes again: none, experts, layer."""
    collectives: list[BlockCollective]
    ops: list[OpWork]
    """All of them in order."""


@document
class PlanDocument:
    """The meshes, groups and blocks of a plan."""

    plan: str
    ranks: int
    parameters: int
    """How many named parameters it has."""
    frozen: int
    """How many of them are frozen."""
    microbatches: int
    meshes: list[PlanMesh]
    groups: dict[str, list[list[int]]]
    """By group: the ranks of each communicator."""
    blocks: list[PlanBlock]


@document
class RankParameter:
    """The part of a parameter that a rank holds."""

    name: str
    dtype: str
    shape: list[int]
    """Of the whole model's parameter."""
    held: list[tuple[int, int]]
    """The first element and the one after the last of each dim."""
    layout: str
    """`ep:shard(0)`, or `replicate`."""
    other_layouts: dict[str, str]
    """Those of the value where it is used, of the gradient and of the optimizer state, if they differ."""
    frozen: bool


@document
class RankState:
    """A state that no optimizer updates, such as the biases of a gate."""

    name: str
    dtype: str
    shape: list[int]
    updated_by: str
    """The block that updates it."""


@document
class RankBlock:
    """The parameters and states of a block."""

    name: str
    parameters: list[RankParameter]
    states: list[RankState]


@document
class RankDocument:
    """What one rank of a plan holds, and with which ranks it communicates."""

    plan: str
    rank: int
    ranks: int
    data_rank: int
    """Which part of a batch its sequences are, from 0."""
    data_size: int
    """How many parts a batch has."""
    stages: list[int]
    """The pipeline stages that it runs."""
    layers: list[int]
    """The layers of these stages."""
    model_layers: int
    """The layers of the model."""
    coordinates: dict[str, dict[str, int]]
    """By mesh: the rank's index along each axis."""
    groups: dict[str, list[int]]
    """By group: the ranks of its communicator, itself included."""
    held_elements: int
    """Elements of parameters that it holds."""
    elements: int
    """Elements of all parameters."""
    blocks: list[RankBlock]

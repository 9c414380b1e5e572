"""`Program`: the whole model as blocks of ops over meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from moec.passes.ir.attribute_types import RoutingGroup
from moec.passes.ir.layout import REPLICATED, Layout
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.op import Meshes, Op
from moec.passes.ir.order import FINAL_ACTIONS, SPLIT_BACKWARD, ActionKind, Order, kinds_of_stage
from moec.passes.ir.roles import Role
from moec.passes.ir.source_line import SourceLine
from moec.passes.ir.value import Parameter, Setting, State, Table, Value

Recompute = Literal["none", "experts", "layer"]
"""The part of a layer that backward computes again instead of saving its activations."""

OutputKey = tuple[Role, int | None, str | None]
"""The role of an output, its layer and its state."""


@dataclass(frozen=True, slots=True)
class Output:
    """The name and role of a value that a block returns.

    `layer` distinguishes the `counts` of several layers. `state` names the state whose new value it is.
    """

    name: str
    role: Role
    layer: int | None = None
    state: str | None = None

    @property
    def key(self) -> OutputKey:
        """Role, layer and state, which no two outputs of a block have in common."""
        return self.role, self.layer, self.state


@dataclass(frozen=True, kw_only=True)
class Block:
    """A straight line of ops: a layer's body, `forward`, a block that gives one scalar, or one that updates states.

    `experts` names the expert mesh of its mixture, if any. `update` names the block that gives its states their new
    values. `final`: `communicate` reduces the partial sums of its outputs. `recompute` is the part of a layer that its
    backward computes again.
    """

    name: str
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    settings: tuple[Setting, ...] = ()
    states: tuple[State, ...] = ()
    tables: tuple[Table, ...] = ()
    experts: str | None = None
    update: str | None = None
    final: bool = False
    recompute: Recompute = "none"
    span: SourceLine | None = field(default=None, compare=False, repr=False)

    @cached_property
    def scope(self) -> Mapping[str, Value]:
        """Every value, parameter (`@name`), setting (`$name`) and state (`^name`) by the name that operands use."""
        names = self.declared()
        for op in self.ops:
            names.update({v.name: v for v in op.results})
        return names

    def declared(self) -> dict[str, Value]:
        """The inputs, tables, parameters as used, settings and states by these names: what is no op's result."""
        names: dict[str, Value] = {v.name: v for v in (*self.inputs, *self.tables)}
        names.update({f"@{p.name}": p.used() for p in self.parameters})
        names.update({f"${s.name}": s for s in self.settings})
        names.update({f"^{s.name}": s for s in self.states})
        return names

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The frozen parameters (`@name`) and the values that are computed from these alone: none has a gradient."""
        frozen = {f"@{p.name}" for p in self.parameters if p.frozen}
        for op in self.ops if frozen else ():
            if frozen.issuperset(op.operands):
                frozen.update(value.name for value in op.results)
        return frozenset(frozen)

    def operands(self, op: Op) -> tuple[Value, ...]:
        """The values that `op` takes."""
        return tuple(self.scope[name] for name in op.operands)

    def output_values(self) -> tuple[Value, ...]:
        """The values that the block returns."""
        return tuple(self.scope[output.name] for output in self.outputs)

    def input(self, role: Role) -> Value | None:
        """The input of this role; None without one."""
        return next((value for value in self.inputs if value.role == role), None)

    def output(self, role: Role) -> Value | None:
        """The first output of this role; None without one."""
        return next((self.scope[output.name] for output in self.outputs if output.role == role), None)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its number, and its bodies, the blocks that may compute it, of which there is one today.

    Identical layers share a body. Its parameters and states belong to the layer: a body declares them, and the layer's
    prefix and the name in the body are the full name.
    """

    number: int
    bodies: tuple[str, ...]

    @property
    def body(self) -> str:
        """The block that computes the layer."""
        (body,) = self.bodies
        return body

    @property
    def path(self) -> str:
        """The layer's name among the parts of a model: `layers.3`."""
        return f"layers.{self.number}"

    @property
    def prefix(self) -> str:
        """What the full names of its parameters and states begin with."""
        return f"{self.path}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage: the consecutive ranks that run the block `forward`, which calls the stage's layers in order.

    The Program's meshes factor the ranks of one stage, and every stage has the same meshes. Several stages may be on
    the same ranks. The block takes and gives, by roles, the values that stages hand on (`HANDED_ON`).
    """

    index: int
    first_rank: int
    num_ranks: int
    forward: str

    @property
    def ranks(self) -> range:
        """The numbers of its ranks in the job."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Layers, and blocks over meshes. `stages` is empty until `partition`; `orders`, until `schedule`.

    Passes return new Programs. Each pipeline rank, the ranks of the same stages, has one of the `orders`, by the table
    of the word `schedule`.

    `tokens` is the layout of the residual stream on the dense mesh (`Meshes.tokens`), once placed. `data_ranks` is the
    number of data-parallel ranks whose sequences one process has; each rank's sequences are a routing group where
    `group = rank`. It is above 1 only for the reference of a plan, whose Program has no mesh. A training step divides a
    rank's sequences into `microbatches` parts; the reference of a plan computes all parts at once.
    """

    name: str
    meshes: tuple[Mesh, ...] = ()
    tokens: Layout = REPLICATED
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...] = ()
    stages: tuple[Stage, ...] = ()
    orders: tuple[Order, ...] = ()
    data_ranks: int = 1
    microbatches: int = 1
    schedule: str = "one_f_one_b"

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of weights apart from those of inputs."""
        return len(self.stages) > 1 and self.schedule in SPLIT_BACKWARD

    def routing_groups(self, group: RoutingGroup) -> int:
        """The routing groups of one process in one forward pass, in order; 0 where each sequence is a group."""
        parts = 1 if self.meshes else self.microbatches
        return {"sequence": 0, "batch": parts, "rank": parts * self.data_ranks}[group]

    @cached_property
    def block_map(self) -> Mapping[str, Block]:
        """The blocks by name."""
        return {block.name: block for block in self.blocks}

    @cached_property
    def settings(self) -> Mapping[str, Setting]:
        """The settings of all blocks by name."""
        return {setting.name: setting for block in self.blocks for setting in block.settings}

    @cached_property
    def layer_blocks(self) -> frozenset[str]:
        """The names of the layers' bodies."""
        return frozenset(body for layer in self.layers for body in layer.bodies)

    @cached_property
    def layers_by_block(self) -> Mapping[str, list[int]]:
        """For each block the numbers of the layers whose body it is; an empty list for other blocks."""
        numbers: dict[str, list[int]] = {block.name: [] for block in self.blocks}
        for layer in self.layers:
            numbers[layer.body].append(layer.number)
        return numbers

    def prefixes(self, block: Block) -> list[str]:
        """The prefixes of a block's parameters, one for each layer with this body; `[""]` for other blocks."""
        return [self.layers[number].prefix for number in self.layers_by_block[block.name]] or [""]

    def kinds_of_stage(self, stage: int) -> list[ActionKind]:
        """The kinds of actions that a micro-batch may have in a stage, in order."""
        return kinds_of_stage(stage, max(len(self.stages), 1), has_loss="loss" in self.block_map)

    @cached_property
    def final_kinds(self) -> list[ActionKind]:
        """The kinds of the actions after the last backward pass of a step, in order."""
        has_states = any(block.states for block in self.blocks)
        return [kind for kind in FINAL_ACTIONS if has_states or kind != "states"]

    @cached_property
    def stages_by_rank(self) -> list[tuple[int, ...]]:
        """The stages of each pipeline rank: those that the same ranks run."""
        by_rank: dict[int, list[int]] = {}
        for stage in self.stages:
            by_rank.setdefault(stage.first_rank, []).append(stage.index)
        return [tuple(by_rank[first]) for first in sorted(by_rank)] or [(0,)]

    @property
    def has_equal_stages(self) -> bool:
        """Whether all pipeline ranks have equally many stages."""
        return len(set(map(len, self.stages_by_rank))) == 1

    @property
    def num_ranks(self) -> int:
        """The ranks of all stages; 1 of a Program without meshes."""
        return max((stage.ranks.stop for stage in self.stages), default=self.mesh("dense").ranks if self.meshes else 1)

    @cached_property
    def states(self) -> Mapping[str, State]:
        """Every state by its full name, `layers.3.moe.gate.bias`; identical layers share the entries."""
        return {f"{layer.prefix}{state.name}": state for layer in self.layers for state in self.body(layer).states}

    def block(self, name: str) -> Block:
        """The block called `name`."""
        return self.block_map[name]

    def body(self, layer: Layer) -> Block:
        """The block that computes the layer."""
        return self.block_map[layer.body]

    @cached_property
    def mesh_map(self) -> Mapping[str, Mesh]:
        """The meshes by name."""
        return {mesh.name: mesh for mesh in self.meshes}

    def mesh(self, name: str) -> Mesh:
        """The mesh called `name`."""
        return self.mesh_map[name]

    def meshes_of(self, block: Block) -> Meshes:
        """The dense mesh, and the expert mesh of this block."""
        return Meshes(self.mesh("dense"), self.mesh(block.experts) if block.experts else None, self.tokens)

    @property
    def num_ops(self) -> int:
        """Ops in all blocks, each shared body counted once."""
        return sum(len(block.ops) for block in self.blocks)

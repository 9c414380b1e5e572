"""`Plan`: a compiled model as data. Its core is the placed Program; reading and making one needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from moec.codegen.unknown_names import KnownNames
from moec.grammar import load_text, to_text
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.grammar.spec import Spec
from moec.passes.ir import (
    REPLICATED,
    VECTOR,
    Block,
    Init,
    Layout,
    Matrices,
    Mesh,
    Parameter,
    Program,
    State,
    Stored,
)
from moec.passes.ir.interface import forwards, stages_of_layers
from moec.passes.ir.layout import local_slices
from moec.passes.ir.mesh import EXPERT_AXES, group_name

if TYPE_CHECKING:  # the import of the kernels' model takes a tenth of the time of loading a plan
    from moec.codegen.kernels.stored_tiles import StoredTiles
    from moec.codegen.search_report import SearchReport

FORMAT = 5
"""Increased whenever this moec would misread a plan of an older one."""

Groups = Mapping[str, tuple[tuple[int, ...], ...]]
"""The rank lists of every process group by its name, `dp` or `ep[4..31]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCut:
    """The dim of a parameter that ZeRO cuts, the mesh axis that cuts it, and the name of the axis's group."""

    axis: str
    dim: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParameter(Stored):
    """A parameter of the whole model: global shape, layouts on a mesh, initial values, groups that sum its gradient."""

    name: str
    mesh: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    weight: Layout
    gradient: Layout
    optimizer_state: Layout
    init: Init
    decays: bool
    sum_over: tuple[str, ...]
    frozen: bool = False
    matrices: Matrices = VECTOR

    @property
    def master(self) -> Layout:
        """The layout of the module's `nn.Parameter`, fp32 unless it is frozen: that of the optimizer state."""
        return self.optimizer_state

    def cells(self, mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """The index, in the whole parameter, of the cells of the master that a rank of its mesh has.

        Row i of a whole parameter of experts is expert i, whatever rank has its cells.
        """
        return local_slices(self.shape, self.master, mesh, rank)

    @property
    def zero_cut(self) -> ZeroCut | None:
        """ZeRO's cut of the master; None where every data-parallel rank has all of it."""
        for axis in self.gathered_over:
            dim = next(dim for dim in range(len(self.shape)) if axis in self.master.cuts(dim))
            mesh = None if self.mesh == "dense" else self.mesh
            return ZeroCut(axis=axis, dim=dim, group=group_name(axis, mesh))
        return None


OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("batch", "batch_size", "global_batch_size"), "it is `plan.spec.train.batch`, over all ranks"),
    **dict.fromkeys(("sequence", "seq_len", "seq_length"), "it is `plan.spec.train.sequence`"),
    **dict.fromkeys(
        ("dp", "ep", "tp", "zero"), "`plan.spec.parallel` has the file's degrees, `plan.meshes` all of them"
    ),
    **dict.fromkeys(("ranks", "size"), "it is `plan.world_size`"),
    "vocab": "it is `plan.spec.model.vocab`",
    "build": "`with moec.launch(plan) as job:`, and in it `job.build()` makes the model",
    "cluster": "it is `plan.spec.cluster`",
    "config": "it is `plan.spec`",
    "graph": "`plan.program` has the ops; `moec.launch` makes the graphs",
    "launch": "`moec.launch(plan)` makes a job",
    "mesh": "`plan.meshes` has them by name",
    "model": "`plan.spec.model` describes it; `with moec.launch(plan) as job:`, and in it `job.build()` makes it",
    "num_ranks": "it is `plan.world_size`",
    "optimizer": "`plan.spec.train` describes it, and `job.optimizer(model)` makes it",
    "state_dict": "a plan has no weights: `model.state_dict()` of `job.build()`, or `job.save(path, model)`",
    "train": "`plan.spec.train` has the file's `train`; your script trains, by `moec.launch(plan)` and `job.step`",
    "verify": "`moec.verify(plan)` compares it with the unsharded model",
    "write": "`plan.save(path)` writes it",
}
"""What to write in place of names that a plan does not have."""


@dataclass(frozen=True, repr=False)
class Plan(KnownNames, owner="plan", other_names=OTHER_NAMES):
    """A compiled model. `codegen/folder.py` writes it, `codegen/reading.py` reads it.

    `moec` is the version that compiled it, `spec_text` the canonical text of the compiled Spec, `tiles` the tiles that
    `moec tune` measured. `groups` follow from the Program's meshes; a plan folder states them for people. `report` is
    what a search found that chose words of the Spec: plans are equal whatever it says.
    """

    moec: str
    spec_text: str
    program: Program
    groups: Groups
    tiles: StoredTiles | None = None
    report: SearchReport | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.program.name

    @cached_property
    def spec(self) -> Spec:
        """The resolved Spec that was compiled."""
        loaded = load_text(self.spec_text, name=f"{self.name}.plan/spec.moe")
        if loaded.spec is None:
            raise DiagnosticError(loaded.diagnostics)
        return loaded.spec

    @cached_property
    def meshes(self) -> Mapping[str, Mesh]:
        """The meshes by name: `dense`, and one for each distribution of experts over ranks."""
        return {mesh.name: mesh for mesh in self.program.meshes}

    @cached_property
    def expert_meshes(self) -> Mapping[int, Mesh]:
        """The mesh of each layer's experts; dense layers have none."""
        mesh_names = ((layer.number, self.program.body(layer).experts) for layer in self.program.layers)
        return {layer: self.meshes[mesh] for layer, mesh in mesh_names if mesh}

    @property
    def world_size(self) -> int:
        """Number of ranks: those of all stages."""
        return self.program.num_ranks

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage, which the meshes factor."""
        return self.meshes["dense"].ranks

    @cached_property
    def groups_in_stage(self) -> Groups:
        """The groups of the first stage; the groups of the other stages have the same places in their stages."""
        if self.world_size == self.stage_size:
            return self.groups
        return {
            name: tuple(ranks for ranks in lists if ranks[0] < self.stage_size) for name, lists in self.groups.items()
        }

    @cached_property
    def parameters(self) -> Mapping[str, PlanParameter]:
        """Every parameter by its full name, `layers.3.attention.q.weight`; identical layers share the entries."""
        return parameters_of(self.program)

    @property
    def states(self) -> Mapping[str, State]:
        """Every state by its full name, `layers.3.moe.gate.bias`; identical layers share the entries."""
        return self.program.states

    @cached_property
    def owners_of_tied(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters of stages on several ranks of a pipeline, with the numbers of these ranks in it."""
        blocks = [self.program.block(stage.forward) for stage in self.program.stages]
        ranks: dict[str, set[int]] = {}
        for stage, block in zip(self.program.stages, blocks, strict=True):
            for parameter in block.parameters:
                ranks.setdefault(parameter.name, set()).add(stage.first_rank // self.stage_size)
        return {name: tuple(sorted(owners)) for name, owners in ranks.items() if len(owners) > 1}

    @cached_property
    def tied(self) -> frozenset[str]:
        """The parameters of several stages, on one rank or on several."""
        blocks = [self.program.block(stage.forward) for stage in self.program.stages]
        uses = Counter(parameter.name for block in blocks for parameter in block.parameters)
        return frozenset(name for name, number in uses.items() if number > 1)

    def elsewhere(self, rank: int) -> frozenset[str]:
        """The full names of parameters and states that only ranks of other pipeline stages have."""
        here, stage_of = self.stages_of(rank), stages_of_layers(self.program)
        blocks = [self.program.block(stage.forward) for stage in self.program.stages]
        own = {parameter.name for stage in here for parameter in blocks[stage].parameters}
        names = (*self.parameters, *self.states)
        of_layers = {name for name in names if name.startswith("layers.")}
        others = {name for name in of_layers if stage_of[int(name.split(".", 2)[1])] not in here}
        return frozenset(others.union(name for name in names if name not in of_layers and name not in own))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The pipeline stages of `rank`, one for all but a pipeline with `virtual` ones."""
        return self.program.stages_by_rank[rank // self.stage_size]

    def data_rank(self, rank: int) -> int:
        """The index of the part of the batch that `rank` reads, of `data_size` parts."""
        return self.meshes["dense"].coordinate(rank % self.stage_size, "dp")

    @property
    def data_size(self) -> int:
        """The number of parts that the batch is cut into."""
        return self.meshes["dense"].size("dp")

    @property
    def sharers(self) -> int:
        """The number of ranks that read the same part of the batch, and count the same tokens: `cp` · `tp`."""
        return self.stage_size // self.data_size

    @property
    def sharing_axis(self) -> str:
        """The axis of these ranks on the dense mesh: `cp`, `tp`, `cp_tp` for both, or `tp` for none."""
        wide = [axis for axis in ("cp", "tp") if self.meshes["dense"].size(axis) > 1]
        return "_".join(wide) or "tp"

    @property
    def pipeline(self) -> int:
        """The number of ranks of a pipeline, each with its stages."""
        return self.world_size // self.stage_size

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline, which run all stages for the same tokens."""
        return tuple(tuple(range(first, self.world_size, self.stage_size)) for first in range(self.stage_size))

    @property
    def readers(self) -> int:
        """The number of ranks, of all stages, that read the same part of the batch."""
        return self.sharers * self.pipeline

    def reading_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks, of all stages, that read the same part of the batch as `rank`."""
        sharing = self.sharing_ranks(rank % self.stage_size)
        return tuple(first + other for first in range(0, self.world_size, self.stage_size) for other in sharing)

    def sharing_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of its stage that read the same part of the batch as `rank`."""
        first = rank // self.sharers * self.sharers  # `dp` is the outermost axis
        return tuple(range(first, first + self.sharers))

    @cached_property
    def result_layout(self) -> Layout:
        """The layout of the logits `[batch, sequence, vocab]` of a forward pass, or of a layer's y."""
        return forwards(self.program)[-1].output_values()[0].layout or REPLICATED

    def __repr__(self) -> str:
        from moec.codegen.plan_in_words import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from moec.codegen.plan_in_words import as_table

        return as_table(self)

    def save(self, path: str | Path) -> Path:
        """Writes the plan folder, to a temporary name first. Replaces a plan, never anything else."""
        from moec.codegen.folder import write_plan

        return write_plan(self, Path(path))


def make_plan(spec: Spec, program: Program, version: str, report: SearchReport | None = None) -> Plan:
    """Makes the plan of a Program that went through every pass; with the `report` of the search that chose words."""
    if not program.stages:
        raise InternalError("the Program is not partitioned")
    return Plan(version, to_text(spec), program, groups_of(program), report=report)


def groups_of(program: Program) -> Groups:
    """The rank lists of every axis with more than one rank, in each pipeline stage, by the name that graphs use."""
    return {
        group_name(axis, mesh.name if mesh.name != "dense" else None): tuple(
            tuple(place * mesh.ranks + rank for rank in ranks)
            for place in range(len(program.stages_by_rank))
            for ranks in mesh.groups(axis)
        )
        for mesh in program.meshes
        for axis in (*mesh.wide_axes(), *mesh.joint_axes())
    }


def parameters_of(program: Program) -> dict[str, PlanParameter]:
    """Every parameter of a Program by its full name."""
    parameters = dict[str, PlanParameter]()
    for block in program.blocks:
        prefixes = program.prefixes(block)
        for parameter in parameters_of_block(block):
            parameters.update({f"{prefix}{parameter.name}": parameter for prefix in prefixes})
    return parameters


def parameters_of_block(block: Block) -> tuple[PlanParameter, ...]:
    """The parameters of one block, named relative to it."""
    return tuple(_placed(parameter, block) for parameter in block.parameters)


def _placed(p: Parameter, block: Block) -> PlanParameter:
    layout, axes = p.layout or REPLICATED, p.sum_over or ()
    weight, gradient, state = (own_layout or layout for own_layout in (p.weight, p.gradient, p.optimizer_state))
    on_experts = not set(EXPERT_AXES).isdisjoint((*layout.axes, *axes, *state.axes))
    return PlanParameter(
        name=p.name,
        mesh=block.experts if block.experts and on_experts else "dense",
        shape=tuple(d for d in p.shape if isinstance(d, int)),
        dtype=str(p.dtype),
        layout=layout,
        weight=weight,
        gradient=gradient,
        optimizer_state=state,
        init=p.init,
        decays=p.decays,
        frozen=p.frozen,
        matrices=p.matrices,
        sum_over=tuple(group_name(axis, block.experts) for axis in axes),
    )

"""`Plan`: everything a training job needs, as data. Reading one never imports torch and never executes any of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field

from moec.codegen.emit import emit
from moec.codegen.graph import LAYER_RESULT, MODEL_RESULT, Data, DottedName, Label, StageGraphs
from moec.codegen.stored_tiles import StoredTiles
from moec.grammar import load_text, to_text
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.grammar.spec import Spec
from moec.passes.ir import REPLICATED, Layout, Mesh, Parameter, Program
from moec.passes.ir.mesh import EXPERT_AXES, group_name

FORMAT = 1
"""Raised whenever a plan of an older moec would be misread."""

Positive = Annotated[int, Field(ge=1)]


class MeshData(Data):
    """A mesh: its name, and its axes with their sizes, the outermost first."""

    name: Label
    axes: tuple[tuple[Annotated[str, Field(pattern=r"^[a-z]{1,10}$")], Positive], ...]

    def mesh(self) -> Mesh:
        """As the IR has it."""
        return Mesh(self.name, self.axes)


class ParameterData(Data):
    """A parameter of a graph: global shape, layout on a mesh, start, and the groups that sum its gradient."""

    name: DottedName
    mesh: Label
    shape: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=8)]
    dtype: Annotated[str, Field(pattern=r"^(bf16|fp32)$")]
    layout: Annotated[str, Field(pattern=r"^[a-z0-9_:() ]{1,200}$")]
    init: Annotated[str, Field(pattern=r"^(ones|zeros|normal)$")]
    std: float
    decays: bool
    sum_over: tuple[Label, ...]


class Body(Data):
    """A shared body: its graph, the layers that run it (none for `forward` and `loss`), its mesh and parameters."""

    graph: Label
    layers: tuple[Annotated[int, Field(ge=0)], ...]
    experts: Label | None
    parameters: tuple[ParameterData, ...]


class Manifest(Data):
    """What `plan.json` holds, digests apart."""

    format: int
    moec: str
    name: str
    spec: str
    meshes: tuple[MeshData, ...]
    groups: dict[Label, tuple[tuple[int, ...], ...]]
    bodies: tuple[Body, ...]
    num_stages: Positive


@dataclass(frozen=True)
class Plan:
    """A compiled model: manifest, stages, and the tiles that `moec tune` measured. `codegen/folder.py` writes it."""

    manifest: Manifest
    stages: tuple[StageGraphs, ...]
    tiles: StoredTiles | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.name

    @cached_property
    def spec(self) -> Spec:
        """The resolved Spec that was compiled, read back from the canonical text in the manifest."""
        loaded = load_text(self.manifest.spec, name=f"{self.name}.plan")
        if loaded.spec is None:
            raise DiagnosticError(loaded.diagnostics)
        return loaded.spec

    @cached_property
    def meshes(self) -> Mapping[str, Mesh]:
        """The meshes by name: `dense`, and one for each way that experts are spread."""
        return {data.name: data.mesh() for data in self.manifest.meshes}

    @cached_property
    def expert_meshes(self) -> Mapping[int, Mesh]:
        """The mesh of each layer's experts; dense layers have none."""
        return {
            layer: self.meshes[body.experts] for body in self.manifest.bodies if body.experts for layer in body.layers
        }

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.meshes["dense"].ranks

    @cached_property
    def parameters(self) -> Mapping[str, ParameterData]:
        """Every parameter by its full name, `layers.3.attention.q.weight`; identical layers share the entries."""
        return _by_full_name(self.manifest.bodies)

    def data_rank(self, rank: int) -> int:
        """Which share of the batch `rank` reads, of `data_size`."""
        return self.meshes["dense"].coordinate(rank, "dp")

    @property
    def data_size(self) -> int:
        """Into how many shares the batch is cut."""
        return self.meshes["dense"].size("dp")

    @cached_property
    def result_layout(self) -> Layout:
        """How the logits `[batch, sequence, vocab]` of a forward pass, or a layer's y, lie on the dense mesh."""
        name = MODEL_RESULT if self.spec.has_model else LAYER_RESULT
        nodes = self.stages[-1].graph("forward").nodes
        return Layout.parse(next((node.layout for node in nodes if node.name == name), None) or "replicate")

    def mesh_of_group(self, name: str) -> tuple[Mesh, str]:
        """The mesh and axis that a group's name stands for."""
        axis = name.split("[")[0]
        mesh = "experts" + name.removeprefix(axis) if axis in EXPERT_AXES else "dense"
        return self.meshes[mesh], axis

    def in_evaluation(self) -> Plan:
        """The plan as it runs in evaluation; itself where nothing differs."""
        stages = tuple(stage.in_evaluation() for stage in self.stages)
        return self if stages == self.stages else replace(self, stages=stages)

    def save(self, path: str | Path) -> Path:
        """Writes the plan folder, to a temporary name first. Replaces a plan, never anything else."""
        from moec.codegen.folder import write_plan

        return write_plan(self, Path(path))


def make_plan(spec: Spec, program: Program, version: str) -> Plan:
    """The plan of a Program that went through every pass."""
    if not program.stages:
        raise InternalError("the Program is not partitioned")
    manifest = Manifest(
        format=FORMAT,
        moec=version,
        name=program.name,
        spec=to_text(spec),
        meshes=tuple(MeshData(name=mesh.name, axes=mesh.axes) for mesh in program.meshes),
        groups=groups_of({mesh.name: mesh for mesh in program.meshes}),
        bodies=_bodies(program),
        num_stages=len(program.stages),
    )
    return Plan(manifest, emit(program))


def without_spans(plan: Plan) -> Plan:
    """The plan with no `.moe` lines in its graphs."""
    stages = tuple(
        stage.model_copy(
            update={
                "graphs": tuple(
                    graph.model_copy(
                        update={"nodes": tuple(node.model_copy(update={"span": None}) for node in graph.nodes)}
                    )
                    for graph in stage.graphs
                )
            }
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def groups_of(meshes: Mapping[str, Mesh]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The rank lists of every axis with more than one rank, by the name that graphs use."""
    return {
        group_name(axis, mesh.name if name != "dense" else None): mesh.groups(axis)
        for name, mesh in meshes.items()
        for axis in mesh.wide_axes()
    }


def parameters_of(program: Program) -> dict[str, ParameterData]:
    """Every parameter of a Program by its full name."""
    return _by_full_name(_bodies(program))


def _by_full_name(bodies: Sequence[Body]) -> dict[str, ParameterData]:
    return {
        f"{prefix}{parameter.name}": parameter
        for body in bodies
        for prefix in ([f"layers.{n}." for n in body.layers] or [""])
        for parameter in body.parameters
    }


def _bodies(program: Program) -> tuple[Body, ...]:
    layers: dict[str, list[int]] = {}
    for op in program.block("forward").ops:
        if op.mnemonic == "call":
            attributes = op.attributes()
            layers.setdefault(attributes["block"], []).append(attributes["layer"])
    return tuple(
        Body(
            graph=block.name,
            layers=tuple(layers.get(block.name, ())),
            experts=block.experts,
            parameters=tuple(_parameter(p, block.experts) for p in block.parameters),
        )
        for block in program.blocks
    )


def _parameter(p: Parameter, experts: str | None) -> ParameterData:
    layout, sums = p.layout or REPLICATED, p.sum_over or ()
    on_experts = not set(EXPERT_AXES).isdisjoint((*layout.axes, *sums))
    return ParameterData(
        name=p.name,
        mesh=experts if experts and on_experts else "dense",
        shape=tuple(d for d in p.shape if isinstance(d, int)),
        dtype=str(p.dtype),
        layout=str(layout),
        init=p.init.kind,
        std=p.init.std,
        decays=p.decays,
        sum_over=tuple(group_name(axis, experts) for axis in sums),
    )

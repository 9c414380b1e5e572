"""place: gives the Program its meshes, from stated or default degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moec.grammar.spec import Spec
from moec.passes.ir import Block, Mesh, Meshes, Program
from moec.passes.ir.ops import Call
from moec.passes.layer_names import layer_set_name
from moec.passes.place.degrees import ExpertDegrees, choose_degrees


@dataclass(frozen=True, slots=True)
class Place:
    """Gives the Program its meshes. Stated degrees are kept; the others take the defaults of the language.

    Layers with the same expert degrees use one expert mesh, and so its groups. A block lies on one mesh: where
    identical layers have different degrees, each mesh gets a separate block.

    Defaults: `ep` is the largest degree that divides the ranks and the experts of every MoE layer without a stated one;
    `tp = 1`; `dp = ranks / tp`; `edp = ranks / ep`. Raises `DiagnosticError` with every rule that a degree breaks.
    """

    spec: Spec

    def apply(self, program: Program) -> Program:
        """The Program with its dense mesh, and an expert mesh for each degree of its MoE layers."""
        degrees = choose_degrees(self.spec)
        dense = Mesh("dense", (("pp", 1), ("dp", degrees.dp), ("cp", 1), ("tp", degrees.tp)))
        meshes = [_expert_mesh(experts) for experts in degrees.experts]
        mesh_of = {
            layer: mesh.name for mesh, experts in zip(meshes, degrees.experts, strict=True) for layer in experts.layers
        }
        placed = replace(_on_expert_meshes(program, mesh_of), meshes=(dense, *meshes))
        own = Meshes(dense).own_tokens
        return replace(placed, tokens=own if self.spec.parallel.sequence_parallel else own.replace("tp", None))


def _expert_mesh(experts: ExpertDegrees) -> Mesh:
    axes = (("pp", 1), ("edp", experts.edp), ("ep", experts.ep), ("etp", 1))
    return Mesh(f"experts{layer_set_name(experts.layers)}", axes)


def _on_expert_meshes(program: Program, mesh_of: Mapping[int, str]) -> Program:
    """The Program with every mixture on the mesh of its layers: one block per layer set and mesh."""
    layers: dict[str, dict[str, list[int]]] = {}
    for op in program.block("forward").ops:
        if isinstance(op, Call) and op.layer in mesh_of:
            layers.setdefault(op.block, {}).setdefault(mesh_of[op.layer], []).append(op.layer)
    blocks: list[Block] = []
    renamed: dict[int, str] = {}
    for block in program.blocks:
        of_mesh = layers.get(block.name, {})
        if not of_mesh:
            blocks.append(block)
        elif len(of_mesh) == 1:
            blocks.append(replace(block, experts=next(iter(of_mesh))))
        for mesh, numbers in of_mesh.items() if len(of_mesh) > 1 else ():
            part = replace(block, name=f"layers{layer_set_name(numbers)}", experts=mesh)
            renamed.update(dict.fromkeys(numbers, part.name))
            blocks.append(part)
    if not renamed:
        return replace(program, blocks=tuple(blocks))
    return replace(
        program, blocks=tuple(_calling(renamed, block) if block.name == "forward" else block for block in blocks)
    )


def _calling(renamed: Mapping[int, str], forward: Block) -> Block:
    """`forward` with its calls changed to the renamed blocks; `renamed` maps a layer to its block."""
    ops = tuple(
        replace(op, block=renamed[op.layer]) if isinstance(op, Call) and op.layer in renamed else op
        for op in forward.ops
    )
    return replace(forward, ops=ops)

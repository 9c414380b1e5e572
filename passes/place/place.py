"""place: gives the Program its meshes, micro-batches and recomputation, as the degrees say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moec.passes.degrees.degrees import Degrees, ExpertDegrees
from moec.passes.ir import Block, Mesh, Meshes, Program, Recompute
from moec.passes.ir.ops import Call
from moec.passes.layer_names import layer_set_name


@dataclass(frozen=True, slots=True)
class Place:
    """Gives the Program its meshes.

    Layers with the same expert degrees use one expert mesh, and so its groups. A block lies on one mesh and recomputes
    one part of itself: identical layers with different degrees, or a different `recompute`, get separate blocks.
    """

    degrees: Degrees

    def apply(self, program: Program) -> Program:
        """The Program with its dense mesh, and an expert mesh for each degree of its MoE layers."""
        degrees = self.degrees
        dense = Mesh("dense", (("dp", degrees.dp), ("cp", degrees.cp), ("tp", degrees.tp)))
        meshes = [_expert_mesh(experts) for experts in degrees.experts]
        mesh_of = {
            layer: mesh.name for mesh, experts in zip(meshes, degrees.experts, strict=True) for layer in experts.layers
        }
        variants = {layer: _Variant(mesh_of.get(layer), recompute) for layer, recompute in enumerate(degrees.recompute)}
        tokens = Meshes(dense).own_tokens
        return replace(
            _varied(program, variants),
            meshes=(dense, *meshes),
            tokens=tokens if degrees.sequence_parallel else tokens.replace("tp", None),
            microbatches=degrees.microbatches,
        )


def _expert_mesh(experts: ExpertDegrees) -> Mesh:
    axes = (("edp", experts.edp), ("ep", experts.ep), ("etp", experts.etp))
    return Mesh(f"experts{layer_set_name(experts.layers)}", axes)


@dataclass(frozen=True, slots=True)
class _Variant:
    """A block's expert mesh, None without a mixture, and the part of the block that its backward recomputes."""

    experts: str | None
    recompute: Recompute


def _varied(program: Program, variants: Mapping[int, _Variant]) -> Program:
    """The Program with the variant of each layer on its block: one block per layer set and variant."""
    layers: dict[str, dict[_Variant, list[int]]] = {}
    for layer in program.layers:
        layers.setdefault(layer.body, {}).setdefault(variants[layer.number], []).append(layer.number)
    blocks: list[Block] = []
    renamed: dict[int, str] = {}
    for block in program.blocks:
        of_block = layers.get(block.name, {})
        if not of_block:
            blocks.append(block)
        for variant, numbers in of_block.items():
            name = block.name if len(of_block) == 1 else f"layers{layer_set_name(numbers)}"
            renamed.update(dict.fromkeys(numbers, name))
            blocks.append(replace(block, name=name, experts=variant.experts, recompute=variant.recompute))
    return replace(
        program,
        blocks=tuple(_calling(renamed, block) if block.name == "forward" else block for block in blocks),
        layers=tuple(replace(layer, bodies=(renamed[layer.number],)) for layer in program.layers),
    )


def recomputing(program: Program, words: Sequence[Recompute]) -> Program:
    """A Program whose layers recompute nothing, with a word of `recompute` for each layer."""
    variants = {layer.number: _Variant(program.body(layer).experts, words[layer.number]) for layer in program.layers}
    return _varied(program, variants)


def _calling(renamed: Mapping[int, str], forward: Block) -> Block:
    """`forward` with its calls changed to the renamed blocks; `renamed` maps a layer to its block."""
    ops = tuple(
        replace(op, block=renamed[op.layer]) if isinstance(op, Call) and op.layer in renamed else op
        for op in forward.ops
    )
    return replace(forward, ops=ops)

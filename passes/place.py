"""place: check the degrees that the file states, and fill in the defaults of those it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.grammar.spec import Spec
from moec.passes.degrees import choose_degrees
from moec.passes.ir import Mesh, Program, layer_set_name


@dataclass(frozen=True, slots=True)
class Place:
    """Gives the Program its meshes. Stated degrees are kept; the others take the defaults of the language.

    Defaults: `ep` is the largest degree that divides the ranks and every MoE layer's experts; `dp = ranks`;
    `edp = ranks / ep`. Raises `DiagnosticError` with every rule that a stated degree breaks.
    """

    spec: Spec

    def apply(self, program: Program) -> Program:
        """The Program with its dense mesh and one expert mesh for its MoE layers."""
        degrees = choose_degrees(self.spec)
        dense = Mesh("dense", (("pp", 1), ("dp", degrees.dp), ("cp", 1), ("tp", 1)))
        layers = [number for number, layer in enumerate(self.spec.model.layers) if layer.moe is not None]
        if not layers:
            return replace(program, meshes=(dense,))
        axes = (("pp", 1), ("edp", degrees.edp), ("ep", degrees.ep), ("etp", 1))
        experts = Mesh(f"experts{layer_set_name(layers)}", axes)
        blocks = tuple(
            replace(block, experts=experts.name) if any(p.name.startswith("moe.") for p in block.parameters) else block
            for block in program.blocks
        )
        return replace(program, meshes=(dense, experts), blocks=blocks)

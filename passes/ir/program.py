"""`Program`: the whole model as blocks of ops over meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moec.grammar.source import Span
from moec.passes.ir.layout import REPLICATED, Layout
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.op import Meshes, Op
from moec.passes.ir.value import Parameter, Value


@dataclass(frozen=True, kw_only=True)
class Block:
    """A straight line of ops: one layer's body, the model's `forward`, or its `loss`.

    `experts` names the mesh that its mixture lies on, where it has one. `final` marks a block whose results leave
    the Program: partial sums among them are reduced.
    """

    name: str
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    experts: str | None = None
    final: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)

    @cached_property
    def scope(self) -> Mapping[str, Value]:
        """Every value and (under `@name`) parameter by the name that operands use."""
        names: dict[str, Value] = {v.name: v for v in self.inputs}
        names.update({f"@{p.name}": p for p in self.parameters})
        for op in self.ops:
            names.update({v.name: v for v in op.results})
        return names

    def operands(self, op: Op) -> tuple[Value, ...]:
        """The values that `op` takes."""
        return tuple(self.scope[name] for name in op.operands)

    def output_values(self) -> tuple[Value, ...]:
        """The values that the block gives."""
        return tuple(self.scope[name] for name in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage: which blocks a rank of it runs."""

    index: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Blocks over meshes; `stages` once partitioned. Passes return new Programs.

    `tokens` is how the residual stream lies on the dense mesh (`Meshes.tokens`), once placed.
    """

    name: str
    meshes: tuple[Mesh, ...] = ()
    tokens: Layout = REPLICATED
    blocks: tuple[Block, ...]
    stages: tuple[Stage, ...] = ()

    @cached_property
    def block_map(self) -> Mapping[str, Block]:
        """The blocks by name."""
        return {block.name: block for block in self.blocks}

    def block(self, name: str) -> Block:
        """The block called `name`."""
        return self.block_map[name]

    def mesh(self, name: str) -> Mesh:
        """The mesh called `name`."""
        return next(mesh for mesh in self.meshes if mesh.name == name)

    def meshes_of(self, block: Block) -> Meshes:
        """The dense mesh, and the expert mesh of this block."""
        return Meshes(self.mesh("dense"), self.mesh(block.experts) if block.experts else None, self.tokens)

    @property
    def num_ops(self) -> int:
        """Ops in all blocks, each shared body counted once."""
        return sum(len(block.ops) for block in self.blocks)

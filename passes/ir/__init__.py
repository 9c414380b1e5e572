"""The intermediate representation: typed SSA ops in blocks, placed on meshes."""

from moec.passes.ir.layout import REPLICATED, Layout, Partial, Placement, Shard
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, TypeRuleError
from moec.passes.ir.program import Block, Program, Stage
from moec.passes.ir.value import DTYPE_BYTES, Dim, Init, Parameter, Value, promoted

__all__ = [
    "DTYPE_BYTES",
    "REPLICATED",
    "Block",
    "Dim",
    "Init",
    "Layout",
    "LayoutError",
    "Mesh",
    "Meshes",
    "Op",
    "Parameter",
    "Partial",
    "Placement",
    "Placing",
    "Program",
    "Shard",
    "Stage",
    "Type",
    "TypeRuleError",
    "Value",
    "promoted",
]

"""The intermediate representation: typed SSA ops in blocks, placed on meshes."""

from moec.passes.ir.ir_error import IrError
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Placement, Shard, local_shape, local_slices
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, TypeRuleError
from moec.passes.ir.program import Block, Output, Program, Stage
from moec.passes.ir.source_line import SourceLine
from moec.passes.ir.value import DTYPE_BYTES, TRAINING, Dim, Init, Parameter, Role, Setting, Value, promoted

__all__ = [
    "DTYPE_BYTES",
    "REPLICATED",
    "TRAINING",
    "Block",
    "Dim",
    "Init",
    "IrError",
    "Layout",
    "LayoutError",
    "Mesh",
    "Meshes",
    "Op",
    "Output",
    "Parameter",
    "Partial",
    "Placement",
    "Placing",
    "Program",
    "Role",
    "Setting",
    "Shard",
    "SourceLine",
    "Stage",
    "Type",
    "TypeRuleError",
    "Value",
    "local_shape",
    "local_slices",
    "promoted",
]

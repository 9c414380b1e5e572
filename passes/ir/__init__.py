"""The intermediate representation: typed SSA ops in blocks, placed on meshes."""

from moec.passes.ir.ir_error import IrError
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Placement, Shard, local_shape, local_slices
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, TypeRuleError
from moec.passes.ir.program import Block, Layer, Output, OutputKey, Program, Recompute, Stage
from moec.passes.ir.roles import Role
from moec.passes.ir.source_line import SourceLine
from moec.passes.ir.value import (
    DTYPE_BYTES,
    SEED,
    SETTINGS,
    STEP,
    TRAINING,
    VECTOR,
    Dim,
    Init,
    Matrices,
    Parameter,
    Setting,
    State,
    Stored,
    Table,
    Value,
    promoted,
)

__all__ = [
    "DTYPE_BYTES",
    "REPLICATED",
    "SEED",
    "SETTINGS",
    "STEP",
    "TRAINING",
    "VECTOR",
    "Block",
    "Dim",
    "Init",
    "IrError",
    "Layer",
    "Layout",
    "LayoutError",
    "Matrices",
    "Mesh",
    "Meshes",
    "Op",
    "Output",
    "OutputKey",
    "Parameter",
    "Partial",
    "Placement",
    "Placing",
    "Program",
    "Recompute",
    "Role",
    "Setting",
    "Shard",
    "SourceLine",
    "Stage",
    "State",
    "Stored",
    "Table",
    "Type",
    "TypeRuleError",
    "Value",
    "local_shape",
    "local_slices",
    "promoted",
]

"""Program → torch.fx: one pure function per block, built node by node when a job or `moec verify` needs it."""

from moec.codegen.emit.dtypes import DTYPES
from moec.codegen.emit.emitter import LAYER, NodeInfo, WaysOf, info_of, site_of, target_name
from moec.codegen.emit.functions import Function, emit_function, emit_graph, last_uses, weight_users
from moec.codegen.emit.gating.emit_gates import WEIGHTS
from moec.codegen.emit.recompute import recomputed

__all__ = [
    "DTYPES",
    "LAYER",
    "WEIGHTS",
    "Function",
    "NodeInfo",
    "WaysOf",
    "emit_function",
    "emit_graph",
    "info_of",
    "last_uses",
    "recomputed",
    "site_of",
    "target_name",
    "weight_users",
]

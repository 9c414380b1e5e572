"""Program → torch.fx: one pure function per block, built node by node when a job or `moec verify` needs it."""

from moec.codegen.emit.dtypes import DTYPES
from moec.codegen.emit.emitter import LAYER, NodeFacts, facts_of, site_of, target_name
from moec.codegen.emit.functions import Function, emit_function, emit_graph, weight_users

__all__ = [
    "DTYPES",
    "LAYER",
    "Function",
    "NodeFacts",
    "emit_function",
    "emit_graph",
    "facts_of",
    "site_of",
    "target_name",
    "weight_users",
]

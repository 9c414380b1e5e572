"""Emits ops that map to one torch operator each, from what their classes declare."""

from __future__ import annotations

from typing import Any

import torch

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.op import operand_names
from moec.passes.ir.operator_schema import given_attributes, resolved_arguments


def emit_operator(e: Emitter, op: Op) -> None:
    """Emits one node that calls the op's torch operator, and one node per result where it has several."""
    kind = type(op)
    named = op.named(e.refs(op))
    required, optional = operand_names(kind)
    operands = [named[name] for name in required if name not in kind.typing]
    operands += [named.get(name) for name in optional]
    number = [e.layer_number()] if kind.numbered else []
    attributes = [getattr(op, name) for name in given_attributes(kind)]
    resolved = [_resolve(e, op, name) for name in resolved_arguments(kind)]
    ways = [e.ways(op)] if kind.tiled else []
    target, saves = _target_of(e, op), kind.saved and not recomputes(e, op)
    site = e.site(op) if kind.sited else {}
    arguments = (*operands, *number, *attributes, *resolved, *ways)
    if len(op.results) == 1 and saves:
        e.unpack_first(op, e.call(op, target, *arguments, **site))
    elif len(op.results) == 1:
        e.result(op, target, *arguments, **site)
    else:
        e.results(op, target, *arguments, **site)


def _target_of(e: Emitter, op: Op) -> Any:
    """The torch operator of an op; where experts are recomputed, the one that saves no pre-activations."""
    name = op.torch_operator()
    return getattr(torch.ops.moec, f"{name}_recomputed" if recomputes(e, op) else name).default


def recomputes(e: Emitter, op: Op) -> bool:
    """Whether backward recomputes an op's pre-activations instead of saving them."""
    return e.block.recompute == "experts" and isinstance(op, o.ExpertMlp | o.ExpertMlpPadded | o.MixtureMlp)


def _resolve(e: Emitter, op: Any, name: str) -> Any:
    """An argument that is computed from an attribute and the meshes."""
    match name:
        case "group":
            return e.group(op.axis)
        case "gather_group":
            return e.group(op.gather_axis)
        case "groups":  # routing groups that a process's sequences form: 0 where each sequence is a group
            return e.program.routing_groups(op.group)
        case "spread":  # tokens of a routing group / tokens of it on one rank
            if e.meshes is None:
                return 1
            return e.meshes.sharers * (e.meshes.dense.size("dp") if op.group == "batch" else 1)
    raise AssertionError(name)

"""Which models can generate: each op but attention computes a token from itself, and attention from earlier tokens."""

from __future__ import annotations

from typing import NamedTuple

from moec.codegen.emit.emitter import site_of
from moec.passes.ir import Block, Op, Program
from moec.passes.ir import ops as o
from moec.passes.ir.interface import FORWARD, taken_role


class Refusal(NamedTuple):
    """Why a model cannot generate, in words of the language, and the place of that part of the model."""

    reason: str
    place: str


def live_ops(block: Block) -> tuple[Op, ...]:
    """The ops from which the block's first output is computed, in order; counts and balance terms need further ops."""
    needed, ops = {block.outputs[0].name}, list[Op]()
    for op in reversed(block.ops):
        if any(value.name in needed for value in op.results):
            ops.append(op)
            needed.update(_used(op))
    return tuple(reversed(ops))


def _used(op: Op) -> tuple[str, ...]:
    """The operands of an op that generation needs: numbers of texts and of positions come from the cache's places."""
    return () if isinstance(op, o.Segments | o.NumberSegments) else op.operands


def refusal(program: Program) -> Refusal | None:
    """The first part of the model that computes a token from later ones, or None."""
    forward = program.block(FORWARD)
    if taken_role(program) != "tokens":
        return Refusal("a model of images", str(forward.span or program.name))
    first_layers = {layer.body: layer.number for layer in reversed(program.layers)}
    for block in (*(program.block(name) for name in sorted(first_layers, key=first_layers.__getitem__)), forward):
        for op in live_ops(block):
            if reason := op.other_tokens(block.operands(op)):
                return Refusal(reason, site_of(op, first_layers.get(block.name)))
    return None

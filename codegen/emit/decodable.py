"""Which models can generate: those whose ops compute a token from itself, and attention from the tokens before it."""

from __future__ import annotations

from typing import NamedTuple

from moec.codegen.emit.emitter import site_of
from moec.passes.ir import Block, Op, Program
from moec.passes.ir import ops as o
from moec.passes.ir.interface import FORWARD, taken_role


class Refusal(NamedTuple):
    """What a model has that cannot generate, and where."""

    what: str
    place: str


def live_ops(block: Block) -> tuple[Op, ...]:
    """The ops that the block's first output follows from, in order. Counts and balance terms need the others."""
    wanted, found = {block.outputs[0].name}, list[Op]()
    for op in reversed(block.ops):
        if any(value.name in wanted for value in op.results):
            found.append(op)
            wanted.update(_used(op))
    return tuple(reversed(found))


def _used(op: Op) -> tuple[str, ...]:
    """The operands of an op that generation needs: numbers of texts and of positions come from the cache's places."""
    return () if isinstance(op, o.Segments | o.NumberSegments) else op.operands


def refusal(program: Program) -> Refusal | None:
    """The first thing of the model that computes a token from later ones, or None."""
    forward = program.block(FORWARD)
    if taken_role(program) != "tokens":
        return Refusal("a model of images", str(forward.span or program.name))
    first = {layer.body: layer.number for layer in reversed(program.layers)}
    for block in (*(program.block(name) for name in sorted(first, key=first.__getitem__)), forward):
        for op in live_ops(block):
            if what := op.other_tokens(block.operands(op)):
                return Refusal(what, site_of(op, first.get(block.name)))
    return None

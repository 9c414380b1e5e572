"""A plan without the layers that repeat others: layers of one kind are compared once, for all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from moec.codegen.plan import Plan, groups_of
from moec.grammar import to_text
from moec.grammar.spec import Spec
from moec.passes.ir import Block, Init, Op, Program
from moec.passes.ir.interface import FORWARD, layer_calls
from moec.passes.ir.ops import Call
from moec.passes.pipeline import compile_program

KEPT = 2
"""Layers of each kind that are run. With a single one, parameters of a wrong layer would not show."""

NO_INIT = Init(kind="zeros")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shortened:
    """A plan of fewer layers, and the number that each of them has in the whole plan, which has `depth` layers."""

    plan: Plan
    layers: Sequence[int]
    depth: int

    def with_numbers_of_whole(self, found: T) -> T:
        """A report, or a part of one, with the layers' numbers in the whole plan in each of its texts."""
        return self._numbered(found) if len(self.layers) < self.depth else found

    def _numbered(self, found: Any) -> Any:
        if isinstance(found, str):
            return re.sub(r"\blayers\.(\d+)", lambda number: f"layers.{self.layers[int(number[1])]}", found)
        if isinstance(found, dict):
            return {self._numbered(name): value for name, value in found.items()}
        if is_dataclass(found) and not isinstance(found, type):
            return replace(found, **{each.name: self._numbered(getattr(found, each.name)) for each in fields(found)})
        return found


def without_repeats(plan: Plan, compiled: Program) -> Shortened:
    """`plan` with `KEPT` layers of each kind; `compiled` is the Program that moec compiles the plan's Spec to.

    Layers are of one kind if they run one block, so that they have the same ops, attributes and layouts. What else a
    layer is, its place in `forward`, must be what moec compiles, and without the repeated layers it must be what moec
    compiles the shorter model to. All layers stay where that is not so: in a plan whose layers, `forward`, meshes or
    groups somebody edited, and in models in which a layer has something of its own.
    """
    program = plan.program
    depth = len(layer_calls(program))
    kept = sorted(number for numbers in program.layers_by_block.values() for number in numbers[:KEPT])
    whole = Shortened(plan, range(depth), depth)
    if len(kept) == depth or not _is_compiled_around_bodies(plan, compiled):
        return whole
    spec = _shorter_spec(plan.spec, kept)
    shorter = compile_program(spec, "schedule").program
    forward = _shorter_forward(program.block(FORWARD), kept)
    if not _alike(compiled, shorter, kept) or _nameless(forward) != _nameless(shorter.block(FORWARD)):
        return whole
    names = _names_in_whole(program, shorter, kept)
    blocks = tuple(
        replace(program.block(names[block.name]), name=block.name, experts=block.experts, update=block.update)
        if block.name != FORWARD
        else _with_spans(block, forward)
        for block in shorter.blocks
    )
    short = replace(plan, spec_text=to_text(spec), program=replace(shorter, blocks=blocks), tiles=None)
    return Shortened(replace(short, groups=groups_of(shorter.meshes)), kept, depth)


def _is_compiled_around_bodies(plan: Plan, compiled: Program) -> bool:
    """Whether all of a plan but what is in its layers' bodies is what moec compiles."""
    program = plan.program
    around = [(b.name, b.experts, b.update) for b in program.blocks]
    return (
        around == [(b.name, b.experts, b.update) for b in compiled.blocks]
        and program.block(FORWARD) == compiled.block(FORWARD)
        and (program.meshes, program.tokens, program.microbatches, program.orders)
        == (compiled.meshes, compiled.tokens, compiled.microbatches, compiled.orders)
        and plan.groups == groups_of(compiled.meshes)
    )


def _shorter_spec(spec: Spec, kept: Sequence[int]) -> Spec:
    """The Spec of the layers `kept`, which keep the degrees that it states for them."""
    stated = []
    for block in spec.parallel.layers:
        numbers = tuple(kept.index(number) for number in block.layers if number in kept)
        if numbers or not block.layers:
            stated.append(block.replace(layers=numbers))
    layers = tuple(spec.model.layers[number] for number in kept)
    model = spec.model.replace(layers=layers, depth=len(kept))
    return spec.replace(model=model, parallel=spec.parallel.replace(layers=tuple(stated)))


def _shorter_forward(forward: Block, kept: Collection[int]) -> Block:
    """`forward` with the calls of `kept` only: a layer that is gone hands on what it is given, and counts nothing."""
    handed_on: dict[str, str] = {}
    gone = set[str]()
    ops: list[Op] = []
    for op in forward.ops:
        operands = tuple(handed_on.get(name, name) for name in op.operands if name not in gone)
        if isinstance(op, Call) and op.layer not in kept:
            stream, *others = op.results
            handed_on[stream.name] = operands[0]
            gone.update(value.name for value in others)
        else:
            ops.append(replace(op, operands=operands))
    outputs = tuple(replace(o, name=handed_on.get(o.name, o.name)) for o in forward.outputs if o.name not in gone)
    return replace(forward, ops=tuple(ops), outputs=outputs)


def _nameless(forward: Block) -> Block:
    """`forward` with numbers for the names of values, blocks and layers, in their order."""
    numbers = {value.name: f"v{number}" for number, value in enumerate(v for op in forward.ops for v in op.results)}
    layers = {op.layer: number for number, op in enumerate(op for op in forward.ops if isinstance(op, Call))}

    def renamed(op: Op) -> Op:
        operands = tuple(numbers.get(name, name) for name in op.operands)
        results = tuple(replace(value, name=numbers[value.name]) for value in op.results)
        op = replace(op, block="layer", layer=layers[op.layer]) if isinstance(op, Call) else op
        return replace(op, operands=operands, results=results)

    outputs = tuple(
        replace(o, name=numbers.get(o.name, o.name), layer=None if o.layer is None else layers[o.layer])
        for o in forward.outputs
    )
    return replace(forward, ops=tuple(map(renamed, forward.ops)), outputs=outputs)


def _with_spans(block: Block, other: Block) -> Block:
    """`block` with the lines of `other`, which has the same ops."""
    ops = tuple(replace(op, span=of.span) for op, of in zip(block.ops, other.ops, strict=True))
    return replace(block, ops=ops, parameters=other.parameters, span=other.span)


def _alike(compiled: Program, shorter: Program, kept: Sequence[int]) -> bool:
    """Whether each layer of the shorter model is compiled as the same layer of the whole model, and so is the rest."""
    bodies, others = _bodies(compiled), _bodies(shorter)
    return _rest(compiled) == _rest(shorter) and [bodies[number] for number in kept] == others


def _bodies(program: Program) -> list[object]:
    """For each layer its block, the axes of its experts, and the block that updates its states. Initialisation is left
    out: it depends on the depth."""
    found = list[object]()
    for call in layer_calls(program):
        block = program.block(call.block)
        axes = program.mesh(block.experts).axes if block.experts else ()
        update = replace(program.block(block.update), name="") if block.update else None
        parameters = tuple(replace(p, init=NO_INIT) for p in block.parameters)
        found.append((replace(block, name="", experts=None, update=None, parameters=parameters), axes, update))
    return found


def _rest(program: Program) -> object:
    """What belongs to no layer, but for `forward`."""
    inside = {FORWARD, *program.layer_blocks, *(block.update for block in program.blocks)}
    others = tuple(block for block in program.blocks if block.name not in inside)
    return program.mesh("dense"), program.tokens, program.microbatches, others


def _names_in_whole(program: Program, shorter: Program, kept: Sequence[int]) -> dict[str, str]:
    """The name in `program` of each block of the shorter Program."""
    names = {block.name: block.name for block in shorter.blocks}
    calls = layer_calls(program)
    for call in layer_calls(shorter):
        own = program.block(calls[kept[call.layer]].block)
        names[call.block] = own.name
        if own.update:
            names[shorter.block(call.block).update or ""] = own.update
    return names

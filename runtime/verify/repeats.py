"""A plan without the layers that repeat others: layers of one kind are compared once, for all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from moec.codegen.plan import Plan, groups_of
from moec.grammar import to_text
from moec.grammar.spec import LayerRange, Spec
from moec.passes.ir import Block, Init, Op, Program
from moec.passes.ir.interface import forwards, layer_calls
from moec.passes.ir.ops import Call
from moec.passes.pipeline import compile_program

LAYERS_PER_KIND = 2
"""Layers of each kind that are run. With a single one, parameters of a wrong layer would not show. Each further
pipeline stage runs one more."""

NO_INIT = Init(kind="zeros")


@dataclass(frozen=True, slots=True)
class ShortPlan:
    """A plan of fewer layers, and the number that each of them has in the original plan, which has `depth` layers."""

    plan: Plan
    layers: Sequence[int]
    depth: int

    def with_original_numbers(self, part: Any) -> Any:
        """A report, or a part of one, with the layers' numbers in the original plan in each of its texts."""
        if isinstance(part, str):
            return re.sub(r"\blayers\.(\d+)", lambda number: f"layers.{self.layers[int(number[1])]}", part)
        if isinstance(part, dict):
            return {self.with_original_numbers(name): value for name, value in part.items()}
        if is_dataclass(part) and not isinstance(part, type):
            values = {f.name: self.with_original_numbers(getattr(part, f.name)) for f in fields(part)}
            return replace(part, **values)
        return part


def without_repeats(plan: Plan, compiled: Program) -> ShortPlan:
    """`plan` with `LAYERS_PER_KIND` layers of each kind; `compiled` is the Program compiled from the plan's Spec.

    Layers are of one kind if they run one block, so that they have the same ops, attributes and layouts. What else a
    layer is, its place in `forward`, must be what moec compiles, and without the repeated layers it must be what moec
    compiles the shorter model to. All layers stay where that is not so: in a plan whose layers, `forward`, meshes or
    groups were edited, and in models whose layers differ in more than their numbers.
    """
    program = plan.program
    depth = len(layer_calls(program))
    by_stage = _kept_layers(program)
    layers = [number for numbers in by_stage for number in numbers]
    unchanged = ShortPlan(plan, range(depth), depth)
    if len(layers) == depth or not _is_compiled_around_bodies(plan, compiled):
        return unchanged
    spec = _shorter_spec(plan.spec, by_stage)
    shorter = compile_program(spec, "schedule").program
    kept = {block.name: _shorter_forward(block, layers) for block in forwards(program)}
    if not _has_same_layers(compiled, shorter, layers) or list(map(_nameless, kept.values())) != list(
        map(_nameless, forwards(shorter))
    ):
        return unchanged
    names = _original_names(program, shorter, layers)
    blocks = tuple(
        _with_spans(block, kept[block.name])
        if block.name in kept
        else replace(program.block(names[block.name]), name=block.name, experts=block.experts, update=block.update)
        for block in shorter.blocks
    )
    short = replace(plan, spec_text=to_text(spec), program=replace(shorter, blocks=blocks), tiles=None)
    return ShortPlan(replace(short, groups=groups_of(shorter)), layers, depth)


def _kept_layers(program: Program) -> list[list[int]]:
    """For each stage, the numbers of the layers that are run: the first of each kind."""
    kinds, by_stage = set[str](), list[list[int]]()
    for stage in range(max(1, len(program.stages))):
        layers = dict[str, list[int]]()
        for call in layer_calls(program, [stage]):
            layers.setdefault(call.block, []).append(call.layer)
        kept = {block: numbers[: 1 if block in kinds else LAYERS_PER_KIND] for block, numbers in layers.items()}
        kinds.update(layers)
        by_stage.append(sorted(number for numbers in kept.values() for number in numbers))
    return by_stage


def _is_compiled_around_bodies(plan: Plan, compiled: Program) -> bool:
    """Whether all of a plan is what moec compiles, but for the contents of its layers' blocks."""
    program = plan.program
    return (
        [(b.name, b.experts, b.update) for b in program.blocks]
        == [(b.name, b.experts, b.update) for b in compiled.blocks]
        and forwards(program) == forwards(compiled)
        and (program.meshes, program.tokens, program.microbatches, program.stages, program.orders)
        == (compiled.meshes, compiled.tokens, compiled.microbatches, compiled.stages, compiled.orders)
        and plan.groups == groups_of(compiled)
    )


def _shorter_spec(spec: Spec, by_stage: Sequence[Sequence[int]]) -> Spec:
    """The Spec of these layers of each stage, which keep the degrees that it states for them."""
    layers, blocks = [number for numbers in by_stage for number in numbers], []
    for block in spec.parallel.layers:
        numbers = tuple(layers.index(number) for number in block.layers if number in layers)
        if numbers or not block.layers:
            blocks.append(block.replace(layers=numbers))
    model = spec.model.replace(layers=tuple(spec.model.layers[number] for number in layers), depth=len(layers))
    parallel = spec.parallel.replace(layers=tuple(blocks))
    if len(by_stage) > 1:
        starts = accumulate(map(len, by_stage), initial=0)
        parallel = parallel.replace(stages=tuple(LayerRange(a, b - 1) for a, b in pairwise(starts)))
    return spec.replace(model=model, parallel=parallel)


def _shorter_forward(forward: Block, layers: Collection[int]) -> Block:
    """`forward` with the calls of `layers` only. A removed layer's output is its input, and it counts nothing."""
    inputs_of_removed: dict[str, str] = {}
    removed_counts = set[str]()
    ops: list[Op] = []
    for op in forward.ops:
        operands = tuple(inputs_of_removed.get(name, name) for name in op.operands if name not in removed_counts)
        if isinstance(op, Call) and op.layer not in layers:
            stream, *counts = op.results
            inputs_of_removed[stream.name] = operands[0]
            removed_counts.update(value.name for value in counts)
        else:
            ops.append(replace(op, operands=operands))
    outputs = tuple(
        replace(output, name=inputs_of_removed.get(output.name, output.name))
        for output in forward.outputs
        if output.name not in removed_counts
    )
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


def _with_spans(block: Block, source: Block) -> Block:
    """`block` with the spans of `source`, which has the same ops."""
    ops = tuple(replace(op, span=source_op.span) for op, source_op in zip(block.ops, source.ops, strict=True))
    return replace(block, ops=ops, parameters=source.parameters, span=source.span)


def _has_same_layers(compiled: Program, shorter: Program, layers: Sequence[int]) -> bool:
    """Whether each layer of the shorter model is compiled as in the original model, and so is what is in no layer."""
    bodies = _bodies(compiled)
    return _outside_layers(compiled) == _outside_layers(shorter) and [bodies[n] for n in layers] == _bodies(shorter)


def _bodies(program: Program) -> list[object]:
    """For each layer its block, the axes of its experts, and the block that updates its states. Initialisation is left
    out: it depends on the depth."""
    bodies = list[object]()
    for call in layer_calls(program):
        block = program.block(call.block)
        axes = program.mesh(block.experts).axes if block.experts else ()
        update = replace(program.block(block.update), name="") if block.update else None
        parameters = tuple(replace(p, init=NO_INIT) for p in block.parameters)
        bodies.append((replace(block, name="", experts=None, update=None, parameters=parameters), axes, update))
    return bodies


def _outside_layers(program: Program) -> object:
    """The parts of a Program that belong to no layer, except `forward`."""
    of_stages = {block.name for block in forwards(program)}
    inside = {*of_stages, *program.layer_blocks, *(block.update for block in program.blocks)}
    blocks = tuple(block for block in program.blocks if block.name not in inside)
    return program.mesh("dense"), program.tokens, program.microbatches, program.orders, blocks


def _original_names(program: Program, shorter: Program, layers: Sequence[int]) -> dict[str, str]:
    """The name in `program` of each block of the shorter Program."""
    names = {block.name: block.name for block in shorter.blocks}
    calls = layer_calls(program)
    for call in layer_calls(shorter):
        block = program.block(calls[layers[call.layer]].block)
        names[call.block] = block.name
        if block.update:
            names[shorter.block(call.block).update or ""] = block.update
    return names

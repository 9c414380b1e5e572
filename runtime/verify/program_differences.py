"""Differences between a plan's Program and the Program that moec compiles the plan's Spec to. Nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest

from moec.codegen.plan import Plan, groups_of
from moec.passes.ir import Block, Op, Parameter, Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.ops import Conversion
from moec.runtime.verify.verify_report import Difference

NOT_COMPARED = frozenset({"sharers", "ep", "etp", "block"})
"""Attributes that are not compared: rules require the degrees to be the meshes', and the names of blocks are free."""


_difference = partial(Difference, error=math.inf, unlike=True)


def first_program_difference(plan: Plan, compiled: Program) -> Difference | None:
    """The first difference of any kind between `plan` and `compiled`; spans are ignored."""
    program = plan.program
    for block, expected in zip_longest(program.blocks, compiled.blocks):
        if block == expected:
            continue
        if block is None or expected is None or block.name != expected.name:
            name = (block or expected).name
            return _difference(layer=name, op="block", value=name)
        return _block_difference(block, expected)
    if plan.groups != (groups := groups_of(compiled)):
        name = next(name for name in {**plan.groups, **groups} if plan.groups.get(name) != groups.get(name))
        return _difference(layer="plan", op="group", value=name)
    if program.meshes != compiled.meshes:
        return _difference(layer="plan", op="mesh", value="")
    return _microbatches_difference(program, compiled)


def _block_difference(block: Block, expected: Block) -> Difference:
    """The first difference between two unequal blocks of one name."""
    for op, expected_op in zip_longest(block.ops, expected.ops):
        if op != expected_op:
            is_missing = expected_op is not None and expected_op.results[0].name not in block.scope
            named_op = expected_op if is_missing or op is None else op
            # A missing op has the line of the op in its place: `expected_op` has lines of the plan's spec.moe.
            line = _line_of(op if op is not None else block)
            attribute = _attribute_difference(op, expected_op) if type(op) is type(expected_op) else ""
            value = named_op.results[0].name
            return _difference(layer=block.name, op=named_op.mnemonic, value=value, span=line, attribute=attribute)
    for parameter, expected_parameter in zip_longest(block.parameters, expected.parameters):
        if parameter != expected_parameter:
            line = _line_of(parameter if parameter is not None else block)
            value = f"@{(parameter or expected_parameter).name}"
            return _difference(layer=block.name, op="parameter", value=value, span=line)
    return _difference(layer=block.name, op="block", value=block.name)


def first_attribute_difference(program: Program, compiled: Program) -> Difference | None:
    """The first op whose attributes differ from its counterpart's in `compiled`, or another number of micro-batches.

    A plan may compute the same function by other ops, in another order, on other degrees. So an op's counterpart is of
    the same kind, in the block of the same layer: the op that gives the same name; for names that only one of the
    blocks has, the next op, if both have equally many. Conversions have counterparts only where both blocks have the
    same kinds of them in the same order, on the same meshes. Ops that nothing uses are left out: one could stand in
    the place of an op that is used. An op without a counterpart is not compared.
    """
    if difference := _microbatches_difference(program, compiled):
        return difference
    same_meshes = program.meshes == compiled.meshes
    for block, expected in _corresponding_blocks(program, compiled):
        counterparts = {} if block == expected else _counterparts(block, expected, same_meshes)
        for op in block.ops:
            if id(op) in counterparts and (attribute := _attribute_difference(op, counterparts[id(op)])):
                value, line = op.results[0].name, _line_of(op)
                return _difference(layer=block.name, op=op.mnemonic, value=value, span=line, attribute=attribute)
    return None


def _microbatches_difference(program: Program, compiled: Program) -> Difference | None:
    if program.microbatches == compiled.microbatches:
        return None
    attribute = f"microbatches = {program.microbatches} instead of {compiled.microbatches}"
    return _difference(layer="plan", op="program", value=program.name, attribute=attribute)


def _corresponding_blocks(program: Program, compiled: Program) -> Iterator[tuple[Block, Block]]:
    """The blocks of the two Programs that do the same: those of the same layers, and others by name."""
    block_of_layer = {call.layer: call.block for call in layer_calls(compiled)}
    updates = {block.update for block in program.blocks}
    for block in program.blocks:
        layers = program.layers_by_block[block.name]
        names = {block_of_layer[layer] for layer in layers if layer in block_of_layer}
        if not layers and block.name not in updates:
            names = {block.name}
        for expected in (candidate for candidate in compiled.blocks if candidate.name in names):
            yield block, expected
            if block.update and expected.update:
                yield program.block(block.update), compiled.block(expected.update)


def _counterparts(block: Block, expected: Block, same_meshes: bool) -> dict[int, Op]:
    """The counterpart of each op of `block` that has one, by the `id` of the op."""
    pairs: list[tuple[Op, Op]] = []
    ops, expected_ops = _used_ops(block), _used_ops(expected)
    conversions, expected_conversions = ([op for op in o if isinstance(op, Conversion)] for o in (ops, expected_ops))
    if same_meshes and list(map(type, conversions)) == list(map(type, expected_conversions)):
        pairs += zip(conversions, expected_conversions, strict=True)
    for kind in {type(op): None for op in ops if not isinstance(op, Conversion)}:
        pairs += _pairs(*({op.results[0].name: op for op in o if type(op) is kind} for o in (ops, expected_ops)))
    return {id(op): counterpart for op, counterpart in pairs}


def _used_ops(block: Block) -> list[Op]:
    """The ops that an output of the block follows from."""
    used_names, ops = {output.name for output in block.outputs}, list[Op]()
    for op in reversed(block.ops):
        if used_names.intersection(value.name for value in op.results):
            ops.append(op)
            used_names.update(op.operands)
    return ops[::-1]


def _pairs(ops: Mapping[str, Op], expected_ops: Mapping[str, Op]) -> Iterator[tuple[Op, Op]]:
    """Pairs of ops that give the same name; and of the ops with other names in order, if there are equally many."""
    yield from ((op, expected_ops[name]) for name, op in ops.items() if name in expected_ops)
    unpaired = [op for name, op in ops.items() if name not in expected_ops]
    expected_unpaired = [op for name, op in expected_ops.items() if name not in ops]
    if len(unpaired) == len(expected_unpaired):
        yield from zip(unpaired, expected_unpaired, strict=True)


def _attribute_difference(op: Op, expected: Op) -> str:
    """`window = 48 instead of 32`, of the first attribute that differs; empty if none does."""
    for name, value in op.attributes().items():
        if name not in NOT_COMPARED and value != (expected_value := getattr(expected, name)):
            return f"{name} = {value} instead of {expected_value}"
    return ""


def _line_of(node: Block | Op | Parameter) -> str | None:
    return str(node.span) if node.span else None

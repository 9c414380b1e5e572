"""Where a plan's Program differs from the Program that moec compiles the plan's Spec to. It runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from moec.codegen.plan import Plan, groups_of
from moec.passes.ir import Block, Op, Parameter, Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.ops import Conversion

NOT_COMPARED = frozenset({"tp", "ep", "block"})
"""Attributes that are not compared: rules require the degrees to be the meshes', and the names of blocks are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """The first difference between a plan's Program and the Program compiled from the plan's Spec."""

    layer: str
    op: str
    value: str
    span: str | None
    attribute: str = ""
    """How an attribute differs: `window = 48 instead of 32`. Empty for other differences."""


def first_unlike(plan: Plan, compiled: Program) -> Unlike | None:
    """The first difference of any kind between `plan` and `compiled`; spans are ignored."""
    program = plan.program
    for block, other in zip_longest(program.blocks, compiled.blocks):
        if block == other:
            continue
        if block is None or other is None or block.name != other.name:
            return Unlike(layer=(block or other).name, op="block", value=(block or other).name, span=None)
        return _unlike_in(block, other)
    if plan.groups != (groups := groups_of(compiled.meshes)):
        name = next(name for name in {**plan.groups, **groups} if plan.groups.get(name) != groups.get(name))
        return Unlike(layer="plan", op="group", value=name, span=None)
    if program.meshes != compiled.meshes:
        return Unlike(layer="plan", op="mesh", value="", span=None)
    return _unlike_microbatches(program, compiled)


def _unlike_in(block: Block, other: Block) -> Unlike:
    for op, expected in zip_longest(block.ops, other.ops):
        if op != expected:
            missing = expected is not None and expected.results[0].name not in block.scope
            unlike = expected if missing or op is None else op
            # The line of the op that stands in place of a missing one: `expected` has lines of the plan's spec.moe.
            line = _line_of(op if op is not None else block)
            words = _attribute_unlike(op, expected) if op is not None and type(op) is type(expected) else ""
            return Unlike(
                layer=block.name, op=unlike.mnemonic, value=unlike.results[0].name, span=line, attribute=words
            )
    for parameter, other_parameter in zip_longest(block.parameters, other.parameters):
        if parameter != other_parameter:
            line = _line_of(parameter if parameter is not None else block)
            return Unlike(layer=block.name, op="parameter", value=f"@{(parameter or other_parameter).name}", span=line)
    return Unlike(layer=block.name, op="block", value=block.name, span=None)


def first_unlike_attribute(program: Program, compiled: Program) -> Unlike | None:
    """The first op whose attributes differ from its counterpart's in `compiled`, or another number of micro-batches.

    A plan may compute the same function by other ops, in another order, on other degrees. So an op's counterpart is of
    the same kind, in the block of the same layer: the op that gives the same name; for names that only one of the
    blocks has, the next op, if both have equally many. Conversions have counterparts only where both blocks have the
    same kinds of them in the same order, on the same meshes. Ops that nothing uses are left out: one could stand in
    the place of an op that is used. Only numbers tell whether an op without counterpart is right.
    """
    if unlike := _unlike_microbatches(program, compiled):
        return unlike
    same_meshes = program.meshes == compiled.meshes
    for block, other in _corresponding_blocks(program, compiled):
        counterparts = {} if block == other else _counterparts(block, other, same_meshes)
        for op in block.ops if counterparts else ():
            words = _attribute_unlike(op, counterparts[id(op)]) if id(op) in counterparts else ""
            if words:
                given = op.results[0].name
                return Unlike(layer=block.name, op=op.mnemonic, value=given, span=_line_of(op), attribute=words)
    return None


def _unlike_microbatches(program: Program, compiled: Program) -> Unlike | None:
    if program.microbatches == compiled.microbatches:
        return None
    words = f"microbatches = {program.microbatches} instead of {compiled.microbatches}"
    return Unlike(layer="plan", op="program", value=program.name, span=None, attribute=words)


def _corresponding_blocks(program: Program, compiled: Program) -> Iterator[tuple[Block, Block]]:
    """The blocks of the two Programs that do the same: those of the same layers, and others by name."""
    layers, others = program.layers_by_block, {call.layer: call.block for call in layer_calls(compiled)}
    updates = {block.update for block in program.blocks}
    for block in program.blocks:
        names = {others[layer] for layer in layers[block.name] if layer in others}
        if not layers[block.name] and block.name not in updates:
            names = {block.name}
        for other in (each for each in compiled.blocks if each.name in names):
            yield block, other
            if block.update and other.update:
                yield program.block(block.update), compiled.block(other.update)


def _counterparts(block: Block, other: Block, same_meshes: bool) -> dict[int, Op]:
    """The counterpart of each op of `block` that has one, by the `id` of the op."""
    pairs: list[tuple[Op, Op]] = []
    ops = tuple(map(_used, (block, other)))
    conversions, others = ([op for op in each if isinstance(op, Conversion)] for each in ops)
    if same_meshes and list(map(type, conversions)) == list(map(type, others)):
        pairs += zip(conversions, others, strict=True)
    for kind in {type(op): None for op in ops[0] if not isinstance(op, Conversion)}:
        pairs += _pairs(*({op.results[0].name: op for op in each if type(op) is kind} for each in ops))
    return {id(op): expected for op, expected in pairs}


def _used(block: Block) -> list[Op]:
    """The ops that an output of the block follows from."""
    wanted, found = {output.name for output in block.outputs}, list[Op]()
    for op in reversed(block.ops):
        if wanted.intersection(value.name for value in op.results):
            found.append(op)
            wanted.update(op.operands)
    return found[::-1]


def _pairs(ops: Mapping[str, Op], others: Mapping[str, Op]) -> Iterator[tuple[Op, Op]]:
    """Pairs of ops that give the same name; and of the others in order, if there are equally many."""
    yield from ((op, others[name]) for name, op in ops.items() if name in others)
    rest, other_rest = ops.keys() - others.keys(), others.keys() - ops.keys()
    if len(rest) == len(other_rest):
        yield from zip(
            (op for name, op in ops.items() if name in rest),
            (op for name, op in others.items() if name in other_rest),
            strict=True,
        )


def _attribute_unlike(op: Op, expected: Op) -> str:
    """`window = 48 instead of 32`, of the first attribute that differs; empty if none does."""
    for name, value in op.attributes().items():
        if name not in NOT_COMPARED and value != (other := getattr(expected, name)):
            return f"{name} = {value} instead of {other}"
    return ""


def _line_of(node: Block | Op | Parameter) -> str | None:
    return str(node.span) if node.span else None

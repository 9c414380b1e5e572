"""Wrong plans by the thousand: one random change to the Program of a right plan, or to its groups.

What finds them: the rules of the ops, which refuse a Program that no pass makes (`broken_rule`), and `moec verify`,
which runs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moec.codegen.plan import Plan, groups_of
from moec.grammar.diagnostics import InternalError
from moec.passes.ir import Block, Layout, Op, Parameter, Partial, Placement, Shard, Value
from moec.passes.ir.mesh import EXPERT_AXES
from moec.passes.ir.ops import (
    AllGather,
    AllGatherAlike,
    AllReduce,
    Call,
    Conversion,
    CopyTo,
    CountLabels,
    ReduceScatter,
    Slice,
)
from moec.passes.ir.verifier import check_program


@dataclass(frozen=True, slots=True)
class Change:
    """What was changed, by kind and in words, and the plan that came of it."""

    kind: str
    words: str
    plan: Plan


Found = tuple[str, Plan]
"""The change in words, and the plan."""

Kind = Callable[[Plan, random.Random], Found | None]
"""Makes a change of one kind; None where the draw fits no op of the plan."""


def mutate(plan: Plan, draw: random.Random, kinds: Sequence[Kind] = ()) -> Change:
    """A plan with one random change of one of these kinds, of any kind where none are given."""
    while True:
        kind = draw.choice(kinds or KINDS)
        found = kind(plan, draw)
        if found is not None and found[1] != plan:
            return Change(name_of(kind), *found)


def name_of(kind: Kind) -> str:
    """The name of a kind of change, in words."""
    return kind.__name__.replace("_", " ")


def broken_rule(plan: Plan) -> str | None:
    """The rule that a plan breaks; None if it breaks none. A plan folder states what `groups_of` gives."""
    try:
        check_program(plan.program)
    except InternalError as error:
        return str(error)
    groups = groups_of(plan.program)
    return None if plan.groups == groups else "the groups are not those of the meshes"


Place = tuple[Block, Op]


def _places(plan: Plan, fits: Callable[[Op], bool] = lambda _: True) -> list[Place]:
    return [(block, op) for block in plan.program.blocks for op in block.ops if fits(op)]


def _with_block(plan: Plan, old: Block, new: Block) -> Plan:
    blocks = tuple(new if block is old else block for block in plan.program.blocks)
    return replace(plan, program=replace(plan.program, blocks=blocks))


def _with_op(plan: Plan, place: Place, *instead: Op) -> Plan:
    block, op = place
    ops = [each for old in block.ops for each in (instead if old is op else (old,))]
    return _with_block(plan, block, replace(block, ops=tuple(ops)))


def _renamed(op: Op, old: str, new: str) -> Op:
    return replace(op, operands=tuple(new if name == old else name for name in op.operands))


def _said(place: Place, what: str) -> str:
    block, op = place
    return f"{block.name}: {op.mnemonic} %{op.results[0].name} {what}"


# ---- attributes and kinds of ops -----------------------------------------------------------------------

WORDS = (
    ("softmax", "sigmoid"),
    ("before", "after"),
    ("swiglu", "geglu", "gelu", "relu", "relu2"),
    ("sequence", "batch", "rank"),
    ("sum", "max"),
)
"""Attributes that are one of a few words."""


def another_attribute(plan: Plan, draw: random.Random) -> Found | None:
    """A number, a flag or a word of an op; the axis of a collective is another kind of change."""
    every = ((place, *item) for place in _places(plan) for item in place[1].attributes().items())
    choices = [(place, name) for place, name, value in every if value not in (None, ())]
    place, name = draw.choice(
        [(place, name) for place, name in choices if name != "axis" and not _is_neutral(place, name)]
    )
    old = getattr(place[1], name)
    new = _another(old, plan, draw)
    return _said(place, f"has {name} = {new} for {old}"), _with_op(plan, place, replace(place[1], **{name: new}))


NEUTRAL = frozenset({("switch_loss", "group"), ("permute", "some_are_none")})
"""Attributes on which no number depends: no choice is −1, and a Switch loss's groups are its choices'."""


def _is_neutral(place: Place, name: str) -> bool:
    """Whether no number depends on an attribute.

    The loss may take any number from all logits, not just the largest. Where all ids are counted, none is −100.
    """
    op = place[1]
    largest = isinstance(op, AllReduce) and op.reduce == "max" and name == "reduce"
    every_id = isinstance(op, CountLabels) and not op.valid_only and name == "valid_only"
    return (op.mnemonic, name) in NEUTRAL or largest or every_id


def _another(old: Any, plan: Plan, draw: random.Random) -> Any:
    match old:
        case bool():
            return not old
        case int() | float():
            return old * 2 + 1
        case tuple():
            index = draw.randrange(len(old))
            return (*old[:index], _another(old[index], plan, draw), *old[index + 1 :])
        case _:
            words = next((words for words in WORDS if old in words), [block.name for block in plan.program.blocks])
            return draw.choice([word for word in words if word != old])


ALIKE: tuple[tuple[type[Op], ...], ...] = ((AllGather, AllGatherAlike, ReduceScatter, Slice), (AllReduce, CopyTo))
"""Conversions that have the same attributes, or fewer."""


def another_conversion(plan: Plan, draw: random.Random) -> Found | None:
    """A conversion whose forward or backward is another's."""

    def others(op: Op) -> list[type[Op]]:
        return [kind for kinds in ALIKE if type(op) in kinds for kind in kinds if type(op) is not kind]

    place = draw.choice(_places(plan, lambda op: bool(others(op))))
    op = place[1]
    kind = draw.choice(others(op))
    attributes = {name: value for name, value in op.attributes().items() if name in kind.__dataclass_fields__}
    other = kind(operands=op.operands, results=op.results, span=op.span, **attributes)
    return _said(place, f"is {kind.mnemonic}"), _with_op(plan, place, other)


def another_axis(plan: Plan, draw: random.Random) -> Found | None:
    """A collective over another axis of more than one rank."""
    place = draw.choice(_places(plan, lambda op: isinstance(op, Conversion)))
    block, op = place
    assert isinstance(op, Conversion)
    axes = [axis for axis in _axes(plan, block) if axis != op.axis]
    if not axes:
        return None
    axis = draw.choice(axes)
    return _said(place, f"runs over {axis} for {op.axis}"), _with_op(plan, place, replace(op, axis=axis))


def _axes(plan: Plan, block: Block) -> list[str]:
    """The axes of a block's meshes that have more than one rank."""
    names = {"dense", block.experts}
    return [axis for mesh in plan.program.meshes if mesh.name in names for axis in mesh.wide_axes()]


# ---- which values ops take and give ----------------------------------------------------------------------


def another_operand(plan: Plan, draw: random.Random) -> Found | None:
    """Another value of the block, given before, in the place of one."""
    place = draw.choice(_places(plan))
    return _other_operand(plan, draw, place, list(_given_before(*place)))


def _given_before(block: Block, op: Op) -> Iterator[str]:
    yield from (value.name for value in block.inputs)
    yield from (f"@{parameter.name}" for parameter in block.parameters)
    for other in block.ops:
        if other is op:
            return
        yield from (value.name for value in other.results)


def another_operand_of_its_type(plan: Plan, draw: random.Random) -> Found | None:
    """The same of values that differ in nothing but their name, which no rule tells apart."""
    place = draw.choice(_places(plan))
    block, op = place
    position = draw.randrange(len(op.operands))
    wanted = _type_of(block.scope[op.operands[position]])
    alike = [name for name in _given_before(block, op) if _type_of(block.scope[name]) == wanted]
    return _other_operand(plan, draw, place, alike, position)


def _type_of(value: Value) -> tuple[object, ...]:
    return type(value), value.shape, value.dtype, value.layout, value.ragged


def swapped_operands(plan: Plan, draw: random.Random) -> Found | None:
    """Two operands of one op, each in the place of the other."""
    place = draw.choice(_places(plan, lambda op: len(op.operands) > 1 and op.mnemonic != "add"))
    op = place[1]
    one, other = draw.sample(range(len(op.operands)), 2)
    operands = list(op.operands)
    operands[one], operands[other] = operands[other], operands[one]
    return _said(place, f"takes {', '.join(operands)}"), _with_op(plan, place, replace(op, operands=tuple(operands)))


def another_parameter(plan: Plan, draw: random.Random) -> Found | None:
    """A neighbour's weight."""
    place = draw.choice(_places(plan, lambda op: any(name.startswith("@") for name in op.operands)))
    block, op = place
    position = draw.choice([i for i, name in enumerate(op.operands) if name.startswith("@")])
    return _other_operand(plan, draw, place, [f"@{p.name}" for p in block.parameters], position)


def _other_operand(
    plan: Plan, draw: random.Random, place: Place, names: Sequence[str], position: int | None = None
) -> Found | None:
    op = place[1]
    position = draw.randrange(len(op.operands)) if position is None else position
    names = [name for name in names if name != op.operands[position]]
    if not names:
        return None
    name = draw.choice(names)
    operands = (*op.operands[:position], name, *op.operands[position + 1 :])
    words = f"takes {name} for {op.operands[position]}"
    return _said(place, words), _with_op(plan, place, replace(op, operands=operands))


def an_operand_less(plan: Plan, draw: random.Random) -> Found | None:
    """An op is given all operands but one."""
    place = draw.choice(_places(plan, lambda op: len(op.operands) > 1))
    op = place[1]
    position = draw.randrange(len(op.operands))
    operands = op.operands[:position] + op.operands[position + 1 :]
    words = _said(place, f"is not given {op.operands[position]}")
    return words, _with_op(plan, place, replace(op, operands=operands))


def an_op_less(plan: Plan, draw: random.Random) -> Found | None:
    """An op is left out, its consumers take its first operand."""
    place = draw.choice(_places(plan))
    block, gone = place
    source, name = gone.operands[0], gone.results[0].name
    ops = tuple(_renamed(op, name, source) for op in block.ops if op is not gone)
    outputs = tuple(replace(each, name=source) if each.name == name else each for each in block.outputs)
    return _said(place, "is left out"), _with_block(plan, block, replace(block, ops=ops, outputs=outputs))


def a_conversion_twice(plan: Plan, draw: random.Random) -> Found | None:
    """What a collective gives goes through it once more: a sum is doubled, or a value that is whole is cut."""
    place = draw.choice(_places(plan, lambda op: isinstance(op, Conversion) and len(op.operands) == 1))
    op = place[1]
    first = replace(op, results=(replace(op.results[0], name="once"), *op.results[1:]))
    again = replace(op, operands=("once",), results=op.results[:1])
    if len(op.results) > 1:  # the counts of exchange_counts, whose splits stay as they are
        again = replace(op, operands=("once",), results=(op.results[0], replace(op.results[1], name="again")))
    return _said(place, "is done twice"), _with_op(plan, place, first, again)


def another_output(plan: Plan, draw: random.Random) -> Found | None:
    """A block gives another of its values."""
    block = draw.choice(plan.program.blocks)
    position = draw.randrange(len(block.outputs))
    name = draw.choice([value.name for op in block.ops for value in op.results])
    changed = replace(block.outputs[position], name=name)
    outputs = (*block.outputs[:position], changed, *block.outputs[position + 1 :])
    return f"{block.name} gives {name} for {block.outputs[position].name}", _with_block(
        plan, block, replace(block, outputs=outputs)
    )


def swapped_layers(plan: Plan, draw: random.Random) -> Found | None:
    """Two identical layers run with each other's parameters."""
    calls = [(block, op) for block, op in _places(plan) if isinstance(op, Call)]
    pairs = [(a, b) for a in calls for b in calls if a[1].layer < b[1].layer and a[1].block == b[1].block]
    if not pairs:
        return None
    (block, one), (_, other) = draw.choice(pairs)
    layer = {one: other.layer, other: one.layer}
    ops = tuple(replace(op, layer=layer[op]) if isinstance(op, Call) and op in layer else op for op in block.ops)
    words = f"{block.name}: layers {one.layer} and {other.layer} are swapped"
    return words, _with_block(plan, block, replace(block, ops=ops))


# ---- what the Program says of values and parameters, and of ranks ------------------------------------------


def another_layout(plan: Plan, draw: random.Random) -> Found | None:
    """A value lies otherwise on one axis. Where no graph depends on it, only a rule can see it."""
    block = draw.choice(plan.program.blocks)
    op = draw.choice(block.ops)
    value = draw.choice(op.results)
    layout = _other_layout(plan, block, value, draw)
    if layout is None:
        return None
    results = tuple(replace(v, layout=layout) if v is value else v for v in op.results)
    words = f"{block.name}: %{value.name} is {layout} for {value.layout}"
    return words, _with_op(plan, (block, op), replace(op, results=results))


def another_layout_of_a_parameter(plan: Plan, draw: random.Random) -> Found | None:
    """Each rank has another part of a parameter."""
    block = draw.choice([block for block in plan.program.blocks if block.parameters])
    parameter = draw.choice(block.parameters)
    layout = _other_layout(plan, block, parameter, draw)
    if layout is None:
        return None
    words = f"{block.name}: @{parameter.name} is {layout} for {parameter.layout}"
    return words, _with_parameter(plan, block, parameter, parameter.placed(layout))


def _other_layout(plan: Plan, block: Block, value: Value, draw: random.Random) -> Layout | None:
    axes = _axes(plan, block)
    if isinstance(value, Parameter):
        axes = _on_one_mesh(axes, (*value.layout.axes, *(value.sum_over or ())) if value.layout else ())
    if value.layout is None or not axes:
        return None
    axis = draw.choice(axes)
    placements: list[Placement | None] = [None, *(Shard(dim) for dim in range(len(value.shape)))]
    if not isinstance(value, Parameter):
        placements.append(Partial())
    placements = [placement for placement in placements if placement != value.layout.get(axis)]
    return value.layout.replace(axis, draw.choice(placements)) if placements else None


def _on_one_mesh(axes: Sequence[str], named: Sequence[str]) -> list[str]:
    """The axes that may stand beside those that are named: a parameter lies on one mesh, and is summed there."""
    return [axis for axis in axes if not named or (axis in EXPERT_AXES) == (named[0] in EXPERT_AXES)]


def _with_parameter(plan: Plan, block: Block, old: Parameter, new: Parameter) -> Plan:
    parameters = tuple(new if p is old else p for p in block.parameters)
    return _with_block(plan, block, replace(block, parameters=parameters))


def another_dtype(plan: Plan, draw: random.Random) -> Found | None:
    """A value is said to be of another dtype. Where no graph depends on it, only a rule can see it."""
    place = draw.choice(_places(plan))
    op = place[1]
    value = draw.choice(op.results)
    dtype = draw.choice([name for name in ("bf16", "fp32", "int64") if name != value.dtype])
    results = tuple(replace(v, dtype=dtype) if v is value else v for v in op.results)
    return _said(place, f"gives {value.name} as {dtype}"), _with_op(plan, place, replace(op, results=results))


def other_gradient_sums(plan: Plan, draw: random.Random) -> Found | None:
    """A parameter's gradient is summed over other axes, or none."""
    block = draw.choice([block for block in plan.program.blocks if block.parameters])
    parameter = draw.choice(block.parameters)
    axes = _on_one_mesh(_axes(plan, block), parameter.layout.axes if parameter.layout else ())
    sums = draw.choice([(), *((axis,) for axis in axes)])
    words = f"{block.name}: @{parameter.name} sums its gradient over {sums} for {parameter.sum_over}"
    return words, _with_parameter(plan, block, parameter, replace(parameter, sum_over=sums))


def another_group(plan: Plan, draw: random.Random) -> Found | None:
    """An axis stands for the ranks of another."""
    name, other = draw.sample(sorted(plan.groups), 2)
    return f"{name} has the ranks of {other}", replace(plan, groups={**plan.groups, name: plan.groups[other]})


def another_mesh(plan: Plan, draw: random.Random) -> Found | None:
    """Two axes of a mesh are nested the other way around. The groups that the plan states stay."""
    mesh = draw.choice(plan.program.meshes)
    wide = [i for i, (_, size) in enumerate(mesh.axes) if size > 1]
    if len(wide) < 2:
        return None
    one, other = draw.sample(wide, 2)
    axes = list(mesh.axes)
    axes[one], axes[other] = axes[other], axes[one]
    meshes = tuple(replace(m, axes=tuple(axes)) if m is mesh else m for m in plan.program.meshes)
    program = replace(plan.program, meshes=meshes)
    return f"{mesh.name} is {axes}", replace(plan, program=program)


KINDS: tuple[Kind, ...] = (
    another_attribute,
    another_conversion,
    another_axis,
    another_operand,
    another_operand_of_its_type,
    swapped_operands,
    another_parameter,
    an_operand_less,
    an_op_less,
    a_conversion_twice,
    another_output,
    swapped_layers,
    another_layout,
    another_layout_of_a_parameter,
    another_dtype,
    other_gradient_sums,
    another_group,
    another_mesh,
)

STATED: tuple[Kind, ...] = (another_layout, another_dtype)
"""Changes of what a Program states of values: most change nothing that runs, and only a rule finds them."""

RUN: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in STATED)
"""Changes of what runs: but for what is neutral, `moec verify` finds them without any rule."""

"""Ways to make a right plan wrong: one op, one parameter or one group of its Program at a time.

The changed Programs are not verified: reading them from a plan folder would be refused. They test whether
`moec verify` finds faults that the rules of the ops do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from moec.codegen.emit.emitter import Emitter
from moec.codegen.emit.functions import EMISSIONS
from moec.codegen.plan import Plan
from moec.passes.ir import Meshes, Op, Placing, Program, Value
from moec.passes.ir.op import Type, layout_of
from moec.passes.ir.ops.token_layouts import Blocks


def with_program(plan: Plan, program: Program) -> Plan:
    """The plan with another, unchecked Program."""
    return replace(plan, program=program)


def change_block(plan: Plan, block: str, **update: object) -> Plan:
    """A block with other outputs, or another mesh of experts, as `dataclasses.replace` takes them."""
    found = plan.program.block(block)
    blocks = (replace(b, **update) if b is found else b for b in plan.program.blocks)
    return with_program(plan, replace(plan.program, blocks=tuple(blocks)))


def change_ops(plan: Plan, block: str, change: Callable[[list[Op]], list[Op]]) -> Plan:
    """Replaces the ops of a block by the result of `change`."""
    return change_block(plan, block, ops=tuple(change(list(plan.program.block(block).ops))))


def op_giving(plan: Plan, block: str, value: str) -> Op:
    """The op that computes a value."""
    return next(op for op in plan.program.block(block).ops if value in [v.name for v in op.results])


def change_op(plan: Plan, block: str, value: str, **update: object) -> Plan:
    """The op that gives `value` with other attributes or operands, as `dataclasses.replace` takes them."""
    found = op_giving(plan, block, value)
    return change_ops(plan, block, lambda ops: [replace(op, **update) if op is found else op for op in ops])


def change_kind(plan: Plan, block: str, value: str, kind: type[Op], **attributes: object) -> Plan:
    """Replaces the op that computes `value` by another op with these attributes."""
    found = op_giving(plan, block, value)
    other = kind(operands=found.operands, results=found.results, span=found.span, **attributes)
    return change_ops(plan, block, lambda ops: [other if op is found else op for op in ops])


def bypass(plan: Plan, block: str, value: str) -> Plan:
    """Removes the op that computes `value`; its consumers get its first operand."""
    found = op_giving(plan, block, value)
    wrong = change_ops(
        plan, block, lambda ops: [_renamed(op, value, found.operands[0]) for op in ops if op is not found]
    )
    outputs = wrong.program.block(block).outputs
    renamed = (replace(each, name=found.operands[0]) if each.name == value else each for each in outputs)
    return change_block(wrong, block, outputs=tuple(renamed))


def _renamed(op: Op, old: str, new: str) -> Op:
    return replace(op, operands=tuple(new if name == old else name for name in op.operands))


def change_every(plan: Plan, kind: type[Op], change: Callable[[Any], Op]) -> Plan:
    """Replaces each op of a kind, in whichever block, by the result of `change`."""
    blocks = (
        replace(b, ops=tuple(change(op) if isinstance(op, kind) else op for op in b.ops)) for b in plan.program.blocks
    )
    return with_program(plan, replace(plan.program, blocks=tuple(blocks)))


def change_parameter(plan: Plan, block: str, name: str, **update: object) -> Plan:
    """Replaces fields of a parameter."""
    parameters = plan.program.block(block).parameters
    return change_block(
        plan, block, parameters=tuple(replace(p, **update) if p.name == name else p for p in parameters)
    )


def change_result(plan: Plan, block: str, value: str, **update: object) -> Plan:
    """Replaces fields of a value, such as its layout."""
    found = op_giving(plan, block, value)
    results = tuple(replace(v, **update) if v.name == value else v for v in found.results)
    return change_ops(plan, block, lambda ops: [replace(op, results=results) if op is found else op for op in ops])


def change_sums(plan: Plan, suffix: str, axes: Sequence[str]) -> Plan:
    """The gradients of all parameters whose names end in `suffix` are summed over these axes."""
    blocks = []
    for block in plan.program.blocks:
        parameters = (replace(p, sum_over=tuple(axes)) if p.name.endswith(suffix) else p for p in block.parameters)
        blocks.append(replace(block, parameters=tuple(parameters)))
    return with_program(plan, replace(plan.program, blocks=tuple(blocks)))


def swap_groups(plan: Plan, layers: str = "[1..2]") -> Plan:
    """Swaps the rank lists of ep and edp."""
    ep, edp = "ep" + layers, "edp" + layers
    return replace(plan, groups={**plan.groups, ep: plan.groups[edp], edp: plan.groups[ep]})


def change_groups(plan: Plan, name: str, ranks: tuple[tuple[int, ...], ...]) -> Plan:
    """Replaces the rank lists of a group."""
    return replace(plan, groups={**plan.groups, name: ranks})


def insert_after(
    plan: Plan, block: str, value: str, kind: type[Op], *, also: Sequence[str] = (), **attributes: Any
) -> Plan:
    """Puts an op between `value` and its consumers: `kind` of it and of the operands `also`.

    It gives `planted`, or an output of the block again: a caller of `forward` asks for its outputs by name.
    """
    body = plan.program.block(block)
    name = value if value in [output.name for output in body.outputs] else "planted"
    planted = kind(operands=(value, *also), results=(replace(body.scope[value], name=name, role=None),), **attributes)

    def change(ops: list[Op]) -> list[Op]:
        changed = [] if any(value in [v.name for v in op.results] for op in ops) else [planted]
        for op in ops:
            changed.append(_renamed(op, value, name))
            if value in [v.name for v in op.results]:
                changed.append(replace(planted, span=op.span))
        return changed

    return change_ops(plan, block, change)


# ---- ops that no pass makes ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted(Op):
    """An op that a test plants: applies the torch function `emitted`. No rule checks it."""

    mnemonic: ClassVar[str] = "planted"
    emitted: str
    """A key of `EMITTED`."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        return tuple(Type(shape=v.shape, dtype=v.dtype) for v in operands[:1])

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        return Placing((layout,), (layout,))


def _to_bf16_and_back(e: Emitter, op: Op) -> None:
    """Rounds to bf16 and widens to fp32 again; in float64 runs nothing is rounded."""
    aten = torch.ops.aten
    narrow = e.call(op, aten.to.dtype, *e.refs(op), e.dtype("bf16"))
    e.result(op, aten.to.dtype, narrow, e.dtype("fp32"))


def _halved(e: Emitter, op: Op) -> None:
    e.result(op, torch.ops.aten.mul.Scalar, *e.refs(op), 0.5)


def _flattened(e: Emitter, op: Op) -> None:
    e.result(op, torch.ops.aten.flatten.using_ints, *e.refs(op), 0, 1)


def _second_token(e: Emitter, op: Op) -> None:
    e.result(op, torch.ops.aten.narrow.default, *e.refs(op), 1, 1, 1)


def _attention_to_all(e: Emitter, op: Op) -> None:
    """Attention without a causal mask. k and v have fewer heads than q."""
    aten = torch.ops.aten
    q, k, v = (e.call(op, aten.transpose.int, ref, 1, 2) for ref in e.refs(op))
    attend = aten.scaled_dot_product_attention.default
    attended = e.call(op, attend, q, k, v, None, 0.0, False, enable_gqa=True)
    e.result(op, aten.transpose.int, attended, 1, 2)


def _positions_from_one(e: Emitter, op: Op) -> None:
    ids, table = e.refs(op)
    counted = e.call(op, torch.ops.aten.cumsum.default, e.call(op, torch.ops.aten.ones_like.default, ids), 1)
    e.result(op, torch.ops.moec.embed.default, counted, table)


def _router_of_bf16(e: Emitter, op: Op) -> None:
    """A router that widens its input, rounds that to bf16 and widens it again."""
    aten, wide = torch.ops.aten, e.dtype("fp32")
    x, weight = (e.call(op, aten.to.dtype, ref, wide) for ref in e.refs(op))
    narrow = e.call(op, aten.to.dtype, x, e.dtype("bf16"))
    e.result(op, aten.linear.default, e.call(op, aten.to.dtype, narrow, wide), weight)


def _embedded_over_dp(e: Emitter, op: Op) -> None:
    e.result(op, torch.ops.moec.embed_part.default, *e.refs(op), e.group("dp"))


EMITTED: dict[str, Callable[[Emitter, Op], None]] = {
    "rounded to bf16": _to_bf16_and_back,
    "halved": _halved,
    "flattened": _flattened,
    "second token": _second_token,
    "attention to all": _attention_to_all,
    "positions from one": _positions_from_one,
    "router of bf16": _router_of_bf16,
    "embedded over dp": _embedded_over_dp,
}


def _planted(e: Emitter, op: Op) -> None:
    assert isinstance(op, Planted)
    EMITTED[op.emitted](e, op)


EMISSIONS[Planted] = _planted


def rounded_to_bf16(plan: Plan, block: str, value: str) -> Plan:
    """Every consumer of a value gets it rounded to bf16 and widened to fp32."""
    return insert_after(plan, block, value, Planted, emitted="rounded to bf16")

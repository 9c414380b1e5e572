"""Plans of two pipeline stages, which no word of the language makes yet: a compiled model, cut after a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moec.codegen.plan import Plan, groups_of
from moec.passes.ir import Block, Op, Output, Program, Stage, Value
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Call
from moec.passes.place.schedule import Schedule

SECOND = "forward[1]"


def in_two_stages(plan: Plan, layers: int) -> Plan:
    """The plan with its first `layers` layers in one stage and the others in another one, on twice as many ranks."""
    program = in_stages(plan.program, layers)
    return replace(plan, program=program, groups=groups_of(program.meshes, len(program.stages)))


def in_stages(program: Program, layers: int) -> Program:
    """The Program cut after so many layers."""
    forward, ranks = program.block(FORWARD), program.mesh("dense").ranks
    calls = [place for place, op in enumerate(forward.ops) if isinstance(op, Call)]
    cut = calls[layers - 1] + 1
    before, after = forward.ops[:cut], forward.ops[cut:]
    stream = before[-1].results[0]
    first_terms, before, after = _balance_so_far(forward, before, after)
    given = [replace(stream, name="received", role="residual")]
    if first_terms is not None:
        given.append(replace(first_terms, name="balance_before", role="balance"))
    renamed = {stream.name: "received", **({first_terms.name: "balance_before"} if first_terms is not None else {})}
    after = tuple(replace(op, operands=tuple(renamed.get(name, name) for name in op.operands)) for op in after)
    after = (*_from_batch(before, after), *after)
    made = {value.name for op in before for value in op.results}
    first_outputs = [Output(stream.name, "residual")]
    if first_terms is not None:
        first_outputs.append(Output(first_terms.name, "balance"))
    counted = [output for output in forward.outputs if output.layer is not None]
    first = _block(forward, FORWARD, forward.inputs, before, [*first_outputs, *(o for o in counted if o.name in made)])
    taken = {name for op in after for name in op.operands}
    beside = [value for value in forward.inputs if value.name in taken]
    second_outputs = [output for output in forward.outputs if output.layer is None or output.name not in made]
    second = _block(forward, SECOND, [*given, *beside], after, second_outputs)
    blocks = []
    for block in program.blocks:
        blocks += [first, second] if block.name == FORWARD else [block]
    stages = tuple(
        Stage(index=index, first_rank=index * ranks, num_ranks=ranks, forward=name)
        for index, name in enumerate((FORWARD, SECOND))
    )
    return Schedule().apply(replace(program, blocks=tuple(blocks), stages=stages, orders=()))


def _balance_so_far(
    forward: Block, before: tuple[Op, ...], after: tuple[Op, ...]
) -> tuple[Value | None, tuple[Op, ...], tuple[Op, ...]]:
    """The sum of the balance terms of the layers in `before`, with the ops changed so that they hand it on."""
    output = next((output for output in forward.outputs if output.role == "balance"), None)
    if output is None:
        return None, before, after
    made = {value.name: value for op in before for value in op.results}
    total = next(op for op in after if output.name in {value.name for value in op.results})
    own = [name for name in total.operands if name in made]
    rest = [name for name in total.operands if name not in made]
    assert own
    assert rest
    if len(own) == 1:
        so_far = made[own[0]]
    else:
        so_far = replace(total.results[0], name="balance_first")
        before = (*before, replace(total, operands=tuple(own), results=(so_far,)))
    added = replace(total, operands=(so_far.name, *rest))
    return so_far, before, tuple(added if op is total else op for op in after)


def _from_batch(before: Sequence[Op], after: Sequence[Op]) -> list[Op]:
    """The ops of `before` that the second stage needs too, since it computes whole numbers from the batch."""
    wanted, found = {name for op in after for name in op.operands}, list[Op]()
    for op in reversed(before):
        is_whole = not isinstance(op, Call) and all(value.dtype == "int64" for value in op.results)
        if is_whole and wanted.intersection(value.name for value in op.results):
            found.insert(0, op)
            wanted.update(op.operands)
    return found


def _block(forward: Block, name: str, inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Output]) -> Block:
    used = {operand for op in ops for operand in op.operands}
    return replace(
        forward,
        name=name,
        inputs=tuple(inputs),
        ops=tuple(ops),
        outputs=tuple(outputs),
        parameters=tuple(p for p in forward.parameters if f"@{p.name}" in used),
        settings=tuple(s for s in forward.settings if f"${s.name}" in used),
    )

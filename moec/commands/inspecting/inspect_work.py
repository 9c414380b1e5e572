"""FLOPs, saved activations and sent bytes of a rank by op: a table of `moec inspect PLAN`."""

from __future__ import annotations

from collections.abc import Iterator

from moec.commands.console.table import amount_or_dash, table
from moec.commands.inspecting.inspect_plan_document import OpWork
from moec.grammar.amounts import si
from moec.passes.cost.totals import BlockCost
from moec.passes.ir import Op
from moec.passes.ir.work.cost import Cost

MAX_LARGEST = 4
"""The most ops with separate lines: this many with the most FLOPs, and this many with the most saved bytes."""

HEAD = ("op", "FLOPs forward", "FLOPs backward", "kept for backward", "sent", "line")


def work_of(cost: BlockCost, microbatches: int) -> list[OpWork]:
    """The work of each op of a block in a step; `cost` is that of a micro-batch."""
    saved = [names for _, names in cost.newly_saved()]
    return [_work(op, op_cost, names, microbatches) for (op, op_cost), names in zip(cost.costs, saved, strict=True)]


def _work(op: Op, cost: Cost, saved: dict[str, float], microbatches: int) -> OpWork:
    return OpWork(
        op=f"{op.mnemonic} %{op.results[0].name}" if op.results else op.mnemonic,
        forward_flops=microbatches * cost.work.forward.flops,
        backward_flops=microbatches * cost.work.backward.flops,
        kept_bytes=sum(saved.values()),
        sent_bytes=microbatches * sum(sent.bytes for sent in cost.sent),
        line=str(op.span) if op.span else None,
    )


def work_table(ops: list[OpWork]) -> Iterator[str]:
    """The largest ops of a block in order, then the sum of the others, then of all; empty if all are 0."""
    if not any(op.forward_flops or op.kept_bytes for op in ops):
        return
    shown = _largest(ops)
    other_ops = [op for index, op in enumerate(ops) if index not in shown]
    rows = [ops[index] for index in sorted(shown)]
    if other_ops:
        rows.append(_sum(f"{len(other_ops)} others", other_ops))
    rows.append(_sum("all", ops))
    yield ""
    yield from table([HEAD, *map(_cells, rows)])


def _largest(ops: list[OpWork]) -> set[int]:
    """The ops with the most FLOPs, and those that save the most bytes."""
    largest: set[int] = set()
    for sizes in ([op.forward_flops for op in ops], [op.kept_bytes for op in ops]):
        ordered = sorted(((size, -index) for index, size in enumerate(sizes) if size), reverse=True)
        largest.update(-index for _, index in ordered[:MAX_LARGEST])
    return largest


def _sum(name: str, ops: list[OpWork]) -> OpWork:
    return OpWork(
        op=name,
        forward_flops=sum(op.forward_flops for op in ops),
        backward_flops=sum(op.backward_flops for op in ops),
        kept_bytes=sum(op.kept_bytes for op in ops),
        sent_bytes=sum(op.sent_bytes for op in ops),
        line=None,
    )


def _cells(op: OpWork) -> tuple[str, ...]:
    flops = (si(number, "G") if number else "-" for number in (op.forward_flops, op.backward_flops))
    return op.op, *flops, amount_or_dash(op.kept_bytes), amount_or_dash(op.sent_bytes), op.line or ""

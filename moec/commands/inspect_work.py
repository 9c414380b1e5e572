"""FLOPs, saved activations and bytes sent by a rank, per op: a table of `moec inspect PLAN`."""

from __future__ import annotations

from collections.abc import Iterator

from moec.commands.table import amount_or_dash, table
from moec.grammar.amounts import si
from moec.passes.cost.cost import Cost
from moec.passes.cost.totals import BlockCost
from moec.passes.ir import Op

MOST = 4
"""Ops with a separate line: so many by FLOPs, and as many by saved bytes."""

HEAD = ("op", "FLOPs forward", "FLOPs backward", "kept for backward", "sent", "line")

Line = tuple[str, float, float, float, float, str]


def work_table(cost: BlockCost, microbatches: int) -> Iterator[str]:
    """The largest ops of a block in order, then the sum of the others, then of all; empty if all are 0.

    `cost` is that of a micro-batch. FLOPs and bytes sent, forward and backward together, are those of a step, bytes
    kept those of a micro-batch. A tensor that several ops save counts for the first.
    """
    saved = [names for _, names in cost.newly_saved()]
    lines = [_line(op, of_op, names, microbatches) for (op, of_op), names in zip(cost.costs, saved, strict=True)]
    if not any(line[1] or line[3] for line in lines):
        return
    shown = _largest(lines)
    others = [line for i, line in enumerate(lines) if i not in shown]
    rows = [lines[i] for i in sorted(shown)]
    if others:
        rows.append(_sum(f"{len(others)} others", others))
    rows.append(_sum("all", lines))
    yield ""
    yield from table([HEAD, *map(_cells, rows)])


def _line(op: Op, cost: Cost, saved: dict[str, float], microbatches: int) -> Line:
    name = f"{op.mnemonic} %{op.results[0].name}" if op.results else op.mnemonic
    once = (cost.work.forward.flops, cost.work.backward.flops, sum(each.bytes for each in cost.sent))
    forward, backward, sent = (microbatches * number for number in once)
    return name, forward, backward, sum(saved.values()), sent, str(op.span) if op.span else ""


def _largest(lines: list[Line]) -> set[int]:
    """The ops with the most FLOPs, and those that save the most bytes."""
    largest: set[int] = set()
    for column in (1, 3):
        ordered = sorted(range(len(lines)), key=lambda i: -float(lines[i][column]))
        largest.update(i for i in ordered[:MOST] if lines[i][column])
    return largest


def _sum(name: str, lines: list[Line]) -> Line:
    forward, backward, saved, sent = (sum(float(line[column]) for line in lines) for column in range(1, 5))
    return name, forward, backward, saved, sent, ""


def _cells(line: Line) -> tuple[str, ...]:
    name, forward, backward, saved, sent, span = line
    flops = (si(number, "G") if number else "-" for number in (forward, backward))
    return name, *flops, amount_or_dash(saved), amount_or_dash(sent), span

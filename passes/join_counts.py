"""join_counts: rows that are exchanged and then gathered copy their counts to the host once, not twice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.passes.ir import Block, Op, Program
from moec.passes.ir.ops import ExchangeAndGatherCounts, ExchangeCounts, GatherCounts


@dataclass(frozen=True, slots=True)
class JoinCounts:
    """Rewrites `exchange_counts` → `gather_counts` to `exchange_and_gather_counts`, in the place of the exchange.

    Every copy makes the host wait for the device. Unjoined, the gather's copy waits until the rows are exchanged.
    """

    def apply(self, program: Program) -> Program:
        """The Program with every such pair joined."""
        blocks = tuple(map(_joined, program.blocks))
        return program if blocks == program.blocks else replace(program, blocks=blocks)


def _joined(block: Block) -> Block:
    exchanges = {op.results[0].name: op for op in block.ops if isinstance(op, ExchangeCounts)}
    replaced: dict[int, tuple[Op, ...]] = {}
    for gather in block.ops:
        if isinstance(gather, GatherCounts) and (exchange := exchanges.pop(gather.operands[0], None)) is not None:
            joined = ExchangeAndGatherCounts(
                operands=exchange.operands,
                results=tuple(v for pair in zip(exchange.results, gather.results, strict=True) for v in pair),
                span=exchange.span,
                axis=exchange.axis,
                gather_axis=gather.axis,
            )
            replaced |= {id(exchange): (joined,), id(gather): ()}
    return replace(block, ops=tuple(new for op in block.ops for new in replaced.get(id(op), (op,))))

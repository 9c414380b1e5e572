"""guests: sends rows to slots, which have experts in any order, and weights of other ranks' experts too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from moec.passes.degrees.degrees import Degrees
from moec.passes.ir import DTYPE_BYTES, REPLICATED, Block, Op, Program, Table, Value
from moec.passes.ir.ops import AssignSlots, ExchangeCounts, Permute
from moec.passes.ir.work.cost import MASTER_BYTES

SLOTS = "slots"
"""The name of the table of a layer, int64 [2, ranks of ep, slots of a rank]: the expert of each slot, −1 for none, and
the share of the expert's rows that the slot gets."""

ROWS_OF_EXPERTS = "rows_of_experts"
"""The name of the counts of rows by experts."""


@dataclass(frozen=True, slots=True)
class PlaceGuests:
    """Rewrites `permute` → `exchange_counts` to `assign_slots` → `permute`, in layers whose degrees have slots.

    A rank's slots are its own experts' first, then those of guests. Behind the rewritten ops experts are slots: shapes
    are inferred again, and ops of rows stay as they are. Counts of rows by experts, which a layer gives, stay counts
    by experts.
    """

    degrees: Degrees

    def apply(self, program: Program) -> Program:
        """The Program with slots for guests."""
        guests = {layer: experts.guests for experts in self.degrees.experts for layer in experts.layers}
        of_block = {layer.body: guests.get(layer.number) for layer in program.layers}
        return _with(program, {name: number for name, number in of_block.items() if number is not None})


def homes_only(program: Program) -> Program:
    """A Program whose slots are those of own experts alone, for passes without guests."""
    return _with(program, {block.name: 0 for block in program.blocks if block.tables})


class SlotShape(NamedTuple):
    """The ranks of a layer's group, its experts, and the slots of a rank for guests."""

    ranks: int
    experts: int
    guests: int


def slot_shape(block: Block) -> SlotShape | None:
    """That of a block with slots; None of others."""
    for table in block.tables:
        _, ranks, of_rank = table.shape
        experts = next(op.num_experts for op in block.ops if isinstance(op, AssignSlots))
        assert isinstance(ranks, int)
        assert isinstance(of_rank, int)
        return SlotShape(ranks, experts, of_rank - experts // ranks)
    return None


def guests_of(block: Block) -> int:
    """The slots for guests of a rank of this block."""
    shape = slot_shape(block)
    return 0 if shape is None else shape.guests


def guest_bytes(block: Block) -> tuple[int, int]:
    """What a guest of a layer sends in a step: an expert's weights, and their gradients in fp32."""
    experts = [
        (p, math.prod(d for d in p.shape[1:] if isinstance(d, int))) for p in block.parameters if p.is_of_experts
    ]
    weights = sum(DTYPE_BYTES[p.dtype] * elements for p, elements in experts)
    return weights, sum(MASTER_BYTES * elements for p, elements in experts if not p.frozen)


def _with(program: Program, guests: dict[str, int]) -> Program:
    """The Program with as many guests of a rank in each of these blocks."""
    if not guests:
        return program
    blocks = (_rewritten(program, b, guests[b.name]) if b.name in guests else b for b in program.blocks)
    return replace(program, blocks=tuple(blocks))


def _rewritten(program: Program, block: Block, guests: int) -> Block:
    """The block with so many guests of a rank. It has slots already, or exchanges counts of experts."""
    mesh = program.mesh(block.experts or "")
    ranks = mesh.size("ep")
    (permute,) = (op for op in block.ops if isinstance(op, Permute))
    experts = next((op.num_experts for op in block.ops if isinstance(op, AssignSlots)), permute.num_experts)
    shape = (2, ranks, experts // ranks + guests)
    parameters = tuple(replace(p, guests=ranks * guests) if p.is_of_experts else p for p in block.parameters)
    table = Table(name=SLOTS, shape=shape, dtype="int64", layout=REPLICATED)
    ops, outputs = block.ops, block.outputs
    if not block.tables:
        ops, counts = tuple(_by_slots(block, permute)), permute.results[1].name
        outputs = tuple(replace(o, name=ROWS_OF_EXPERTS) if o.name == counts else o for o in outputs)
    changed = replace(block, parameters=parameters, tables=(table,), outputs=outputs)
    slots = ranks * shape[2]
    sized = (replace(op, num_experts=slots) if isinstance(op, Permute) else op for op in ops)
    return replace(changed, ops=tuple(_inferred(program, changed, sized)))


def _by_slots(block: Block, permute: Permute) -> Iterator[Op]:
    """The ops with choices of slots, and without the exchange of counts."""
    choices, (rows, counts, positions) = permute.operands[1], permute.results
    (exchange,) = (op for op in block.ops if isinstance(op, ExchangeCounts) and op.operands[0] == counts.name)
    received, splits = exchange.results
    placed = Value(name="placed", shape=(), dtype="int64")
    assign = AssignSlots(
        operands=(choices, SLOTS),
        results=(placed, replace(counts, name=ROWS_OF_EXPERTS), received, splits),
        span=permute.span,
        axis=exchange.axis,
        num_experts=permute.num_experts,
    )
    for op in block.ops:
        if op is permute:
            yield assign
            yield replace(permute, operands=(permute.operands[0], placed.name), results=(rows, counts, positions))
        elif op is not exchange:
            yield op


def _inferred(program: Program, block: Block, ops: Iterable[Op]) -> Iterator[Op]:
    """The ops with the types and layouts of their results as their rules give them now."""
    scope, meshes = block.declared(), program.meshes_of(block)
    for op in ops:
        operands = [scope[name] for name in op.operands]
        types, layouts = op.infer(operands, program.block_map), op.place(operands, meshes, program.block_map).results
        results = [
            replace(value, shape=t.shape, dtype=t.dtype, ragged=t.ragged, layout=layout)
            for value, t, layout in zip(op.results, types, layouts, strict=True)
        ]
        scope.update({value.name: value for value in results})
        yield op.with_results(results)

"""A plan at toy widths: the same layers, degrees, groups and ops, small enough for one machine.

The toy plan is the plan's Program with other widths. Compiling the plan's Spec twice, unchanged and with toy widths,
shows which numbers are widths: the two Programs may differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from moec.codegen.plan import Plan
from moec.grammar import to_text
from moec.grammar.diagnostics import InternalError
from moec.passes.guests.place_guests import guests_of
from moec.passes.ir import Block, Op, Program
from moec.passes.pipeline import compile_program
from moec.runtime.verify.toy_spec import ToySpec, Width


@dataclass(frozen=True, slots=True)
class ToyPlan:
    """A plan at toy widths, and its widths before and after."""

    plan: Plan
    widths: tuple[Width, ...]


def at_toy_widths(plan: Plan, *, fewer_experts: bool = False) -> ToyPlan:
    """`plan` with toy widths. `fewer_experts` keeps only as many experts as degrees and gates need.

    Raises `InternalError` if the compiled Programs differ in more than widths.
    """
    toy_spec = ToySpec(plan, fewer_experts)
    spec = toy_spec.spec()
    compiled, toy = (compile_program(s).program for s in (plan.spec, spec))
    _require_same_but_for(compiled, toy, (*toy_spec.widths, *_slots(compiled, toy)))
    toy_plan = replace(plan, spec_text=to_text(spec), program=_resized(plan.program, compiled, toy), tiles=None)
    return ToyPlan(toy_plan, toy_spec.widths)


def _slots(compiled: Program, toy: Program) -> Iterator[Width]:
    """Numbers of slots, which fewer experts change by themselves: of a rank, of all ranks, and for guests."""
    for before, after in zip(compiled.blocks, toy.blocks, strict=True):
        for table, toy_table in zip(before.tables, after.tables, strict=True):
            (_, ranks, of_rank), (*_, toy_of_rank) = table.shape, toy_table.shape
            assert isinstance(ranks, int)
            assert isinstance(of_rank, int)
            assert isinstance(toy_of_rank, int)
            yield Width("slots", of_rank, toy_of_rank)
            yield Width("slots", ranks * of_rank, ranks * toy_of_rank)
            yield Width("slots", ranks * guests_of(before), ranks * guests_of(after))


def _resized(program: Program, compiled: Program, toy: Program) -> Program:
    """`program` with `toy`'s number wherever it has `compiled`'s number."""
    pairs = {c.name: (c, t) for c, t in zip(compiled.blocks, toy.blocks, strict=True)}
    blocks = (_resized_block(block, *pairs[block.name]) if block.name in pairs else block for block in program.blocks)
    return replace(program, blocks=tuple(blocks))


def _resized_block(block: Block, compiled: Block, toy: Block) -> Block:
    resized: dict[str, Any] = {}
    for field in ("inputs", "states", "tables", "parameters", "ops"):
        pairs = {_name(c): (c, t) for c, t in zip(getattr(compiled, field), getattr(toy, field), strict=True)}
        nodes = getattr(block, field)
        resized[field] = tuple(_resized_node(n, *pairs[_name(n)]) if _name(n) in pairs else n for n in nodes)
    return replace(block, **resized)


def _name(node: Any) -> str:
    return node.results[0].name if isinstance(node, Op) else str(node.name)


def _resized_node(node: Any, compiled: Any, toy: Any) -> Any:
    """`toy`'s number if `node` has `compiled`'s; any other number, which was edited in the plan, stays."""
    if isinstance(node, tuple) and isinstance(compiled, tuple) and isinstance(toy, tuple):
        if len(node) == len(compiled) == len(toy):
            return tuple(_resized_node(n, c, t) for n, c, t in zip(node, compiled, toy, strict=True))
        return node
    if is_dataclass(node) and type(node) is type(compiled) is type(toy):
        changed = {}
        for field in fields(node):
            value = getattr(node, field.name)
            resized = _resized_node(value, getattr(compiled, field.name), getattr(toy, field.name))
            if resized is not value:
                changed[field.name] = resized
        return replace(node, **changed) if changed else node  # type: ignore[type-var]
    return toy if node == compiled and node != toy else node


def _require_same_but_for(compiled: Program, toy: Program, widths: Sequence[Width]) -> None:
    """Raises `InternalError` unless the Programs differ only in shrunk widths and ranks' parts of them."""
    if compiled.meshes != toy.meshes:
        raise InternalError(f"{compiled.name}: toy widths change its meshes")
    for number, toy_number in _unequal(compiled.blocks, toy.blocks):
        are_ints = isinstance(number, int) and isinstance(toy_number, int)
        if not are_ints or not any(number * width.toy == toy_number * width.before for width in widths):
            raise InternalError(f"{compiled.name}: at toy widths {number!r} of its Program becomes {toy_number!r}")


def _unequal(compiled: Any, toy: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs of leaves that differ; spans are ignored."""
    if isinstance(compiled, tuple) and isinstance(toy, tuple) and len(compiled) == len(toy):
        for node, toy_node in zip(compiled, toy, strict=True):
            yield from _unequal(node, toy_node)
    elif is_dataclass(compiled) and type(compiled) is type(toy):
        for field in fields(compiled):
            if field.compare:
                yield from _unequal(getattr(compiled, field.name), getattr(toy, field.name))
    elif compiled != toy:
        yield compiled, toy

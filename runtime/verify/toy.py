"""A plan at toy widths: the same layers, degrees, groups and ops, small enough for one machine.

The toy plan is the plan's Program with other widths. Compiling the plan's Spec twice, unchanged and with toy widths,
shows which numbers are widths: the two Programs may differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from moec.codegen.plan import Plan
from moec.grammar import to_text
from moec.grammar.diagnostics import InternalError
from moec.passes.ir import Block, Program
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
    shrink = ToySpec(plan, fewer_experts)
    spec = shrink.spec()
    compiled, toy = (compile_program(s).program for s in (plan.spec, spec))
    _require_same_but_for(compiled, toy, shrink.widths)
    small = replace(plan, spec_text=to_text(spec), program=_resized(plan.program, compiled, toy), tiles=None)
    return ToyPlan(small, shrink.widths)


def _resized(program: Program, compiled: Program, toy: Program) -> Program:
    """`program` with `toy`'s number wherever it has `compiled`'s number."""
    pairs = {o.name: (o, t) for o, t in zip(compiled.blocks, toy.blocks, strict=True)}
    blocks = (_resized_block(block, *pairs[block.name]) if block.name in pairs else block for block in program.blocks)
    return replace(program, blocks=tuple(blocks))


def _resized_block(block: Block, compiled: Block, toy: Block) -> Block:
    def resized(items: Sequence[Any], before: Sequence[Any], after: Sequence[Any], name: Callable[[Any], str]) -> Any:
        pairs = {name(o): (o, t) for o, t in zip(before, after, strict=True)}
        return tuple(_resized_node(item, *pairs[name(item)]) if name(item) in pairs else item for item in items)

    return replace(
        block,
        inputs=resized(block.inputs, compiled.inputs, toy.inputs, lambda value: value.name),
        states=resized(block.states, compiled.states, toy.states, lambda value: value.name),
        parameters=resized(block.parameters, compiled.parameters, toy.parameters, lambda value: value.name),
        ops=resized(block.ops, compiled.ops, toy.ops, lambda op: op.results[0].name),
    )


def _resized_node(node: Any, compiled: Any, toy: Any) -> Any:
    """`toy`'s number if `node` has `compiled`'s; any other number, which was edited in the plan, stays."""
    if isinstance(node, tuple) and isinstance(compiled, tuple) and isinstance(toy, tuple):
        if len(node) == len(compiled) == len(toy):
            return tuple(_resized_node(g, o, t) for g, o, t in zip(node, compiled, toy, strict=True))
        return node
    if is_dataclass(node) and type(node) is type(compiled) is type(toy):
        changed = {}
        for each in fields(node):
            before = getattr(node, each.name)
            after = _resized_node(before, getattr(compiled, each.name), getattr(toy, each.name))
            if after is not before:
                changed[each.name] = after
        return replace(node, **changed) if changed else node  # type: ignore[type-var]
    return toy if node == compiled and node != toy else node


def _require_same_but_for(compiled: Program, toy: Program, widths: Sequence[Width]) -> None:
    """Raises `InternalError` unless the Programs differ only in shrunk widths and ranks' parts of them."""
    if compiled.meshes != toy.meshes:
        raise InternalError(f"{compiled.name}: toy widths change its meshes")
    for before, after in _unequal(compiled.blocks, toy.blocks):
        numbers = isinstance(before, int) and isinstance(after, int)
        if not numbers or not any(before * width.toy == after * width.before for width in widths):
            raise InternalError(f"{compiled.name}: at toy widths {before!r} of its Program becomes {after!r}")


def _unequal(compiled: Any, toy: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs of leaves that differ; spans are ignored."""
    if isinstance(compiled, tuple) and isinstance(toy, tuple) and len(compiled) == len(toy):
        for before, after in zip(compiled, toy, strict=True):
            yield from _unequal(before, after)
    elif is_dataclass(compiled) and type(compiled) is type(toy):
        for each in fields(compiled):
            if each.compare:
                yield from _unequal(getattr(compiled, each.name), getattr(toy, each.name))
    elif compiled != toy:
        yield compiled, toy

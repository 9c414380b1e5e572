"""schedule: the order of a training step, and what happens to weights and gradients inside of its actions.

`moec verify` takes these events one by one, except the gathers of backward, for which it keeps forward's weights;
what a job does is compared with all of them (`MOEC_LOG_ACTIONS`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from moec.passes.ir import Block, Parameter, Program
from moec.passes.ir.interface import forwards
from moec.passes.ir.ops import Call
from moec.passes.ir.order import Action, Order
from moec.passes.place.pipeline_orders import orders_of


@dataclass(frozen=True, slots=True)
class Schedule:
    """Gives the Program the orders of its step, one for the ranks of the same stages."""

    def apply(self, program: Program) -> Program:
        """The Program with the orders of its step."""
        return replace(program, orders=orders_of(program, program.microbatches))


def orders_of_step(program: Program, microbatches: int) -> tuple[Order, ...]:
    """The plan's orders if they have this many micro-batches, else those of the same schedule with as many."""
    own = program.orders
    return own if own and own[0].microbatches == microbatches else orders_of(program, microbatches)


def order_of_step(program: Program, microbatches: int, stage: int = 0) -> Order:
    """The order, of those of a step, that has the actions of a stage."""
    return next(order for order in orders_of_step(program, microbatches) if stage in order.stages)


# ---- weights and gradients ---------------------------------------------------------------------------------


def gathers_again(p: Parameter) -> bool:
    """Whether every use gathers the weight, in forward and in backward, and drops it afterwards (ZeRO 3)."""
    return p.gathered == "per use"


def keeps_weights(block: Block, passes: int, *, in_pipeline: bool) -> bool:
    """Whether the first pass of a step casts and gathers a layer's weights for all passes of the step.

    It does where it gathers them, or sends them to guests, once per step. In a pipeline it also does for weights that
    are only cast.
    """
    kinds = {p.gathered for p in block.parameters}
    sends = "per step" in kinds or any(p.guests for p in block.parameters)
    return (passes > 1) & ("per use" not in kinds) & (in_pipeline | sends)


def is_gathered(p: Parameter, first: bool) -> bool:
    """Whether a forward pass gathers the weight. `first`: it is the step's first pass, whose weights the later ones
    use."""
    return gathers_again(p) or (p.gathered == "per step" and first)


def is_summed(p: Parameter, last: bool) -> bool:
    """Whether a backward pass sums the gradient over ranks; `last`: it is the last of a step. Gradients of other passes
    are collected, but ZeRO 2 and 3 scatter those of every pass."""
    return not p.frozen and (last or p.scattered_per_pass)


def num_gathers(p: Parameter, passes: int) -> int:
    """How often the forward passes of a step gather the weight."""
    return is_gathered(p, first=True) + (passes - 1) * is_gathered(p, first=False)


def num_sums(p: Parameter, passes: int) -> int:
    """How often the backward passes of a step sum the gradient."""
    return is_summed(p, last=True) + (passes - 1) * is_summed(p, last=False)


def is_sent(p: Parameter) -> bool:
    """Whether several ranks have terms of the gradient."""
    return bool(p.sum_over) or p.gathered != "never"


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered and summed together: those of a layer, or those that `forward` first uses between
    two layers. `first_use` and `last_use`: the places in `forward` where they are used, as numbers of ops.
    """

    name: str
    parameters: tuple[Parameter, ...]
    first_use: int
    last_use: int
    is_layer: bool = True


def units_of(program: Program, stage: int = 0) -> tuple[Unit, ...]:
    """The units of a stage in the order of their first use."""
    forward = forwards(program)[stage]
    scope = {f"@{parameter.name}": parameter for parameter in forward.parameters}
    units, uses = list[Unit](), dict[str, list[int]]()
    for place, op in enumerate(forward.ops):
        if isinstance(op, Call):
            units.append(Unit(program.layers[op.layer].path, program.block(op.block).parameters, place, place))
        for name in op.operands:
            if name in scope:
                uses.setdefault(name, []).append(place)
    layers, segments = [unit.first_use for unit in units], dict[int, list[str]]()
    for name, places in uses.items():
        segments.setdefault(bisect(layers, places[0]), []).append(name)
    for names in segments.values():
        parameters, last_use = tuple(scope[name] for name in names), max(uses[name][-1] for name in names)
        units.append(Unit(parameters[0].name, parameters, uses[names[0]][0], last_use, is_layer=False))
    return tuple(sorted(units, key=lambda unit: unit.first_use))


class Event(NamedTuple):
    """What happens to a unit inside of a forward or a backward pass."""

    kind: Literal["gather", "forward", "backward", "weights", "collect", "reduce"]
    unit: Unit

    def __str__(self) -> str:
        return f"{self.kind} {self.unit.name}"


def events_inside(order: Order, action: Action, units: Sequence[Unit], saved: Container[str] = ()) -> list[Event]:
    """What happens inside of an action. `saved` names the units of which backward needs a weight.

    A gather begins one unit ahead. A `reduce` begins a sum that runs beside later units' backward; all have ended at
    the action `sum`.
    """
    match action.kind:
        case "forward":
            return list(_forward(units, first=action.microbatch == 0))
        case "backward":
            return list(_backward(units, saved, last=is_last_backward(order, action)))
        case "inputs":
            return [event for event in _backward(units, saved, last=False) if event.kind in ("gather", "backward")]
        case "weights":
            backward = _backward(units, (), last=is_last_backward(order, action))
            return [event._replace(kind="weights") if event.kind == "backward" else event for event in backward]
        case _:
            return []


def _forward(units: Sequence[Unit], *, first: bool) -> Iterator[Event]:
    ahead = iter(units)

    def next_gather() -> Iterator[Event]:
        unit = next(ahead, None)
        if unit is not None and any(is_gathered(p, first) for p in unit.parameters):
            yield Event("gather", unit)

    yield from next_gather()
    for unit in units:
        yield from next_gather()
        if unit.is_layer:
            yield Event("forward", unit)


def _backward(units: Sequence[Unit], saved: Container[str], *, last: bool) -> Iterator[Event]:
    """A unit begins where `forward` uses it last, with the gather of what backward needs and, one ahead, of the unit
    before it. It ends where `forward` uses it first."""
    again = [unit for unit in units if unit.name in saved and any(map(gathers_again, unit.parameters))]
    begins = [(unit.last_use, 1, unit) for unit in again]
    ends = [(unit.first_use, 0, unit) for unit in units if any(not p.frozen for p in unit.parameters)]
    begun = set[str]()
    for _, is_begin, unit in sorted([*begins, *ends], key=lambda point: point[:2], reverse=True):
        if is_begin:
            place = again.index(unit)
            for gathered in reversed(again[max(place - 1, 0) : place + 1]):
                if gathered.name not in begun:
                    begun.add(gathered.name)
                    yield Event("gather", gathered)
            continue
        yield Event("backward", unit)
        trained = [p for p in unit.parameters if not p.frozen]
        if not all(is_summed(p, last) for p in trained):
            yield Event("collect", unit)
        if any(is_summed(p, last) and is_sent(p) for p in trained):
            yield Event("reduce", unit)


def is_last_backward(order: Order, action: Action) -> bool:
    """Whether `action` completes the gradients of its stage's parameters: the sums of collected gradients begin in
    it."""
    return action.stage is not None and order.last_of_stage[action.stage] == action

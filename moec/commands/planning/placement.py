"""What `moec plan` says of `adapt { placement = … }`: the seconds of a guest and of a move, beside those of a row."""

from __future__ import annotations

from collections.abc import Iterator

from moec.commands.planning.plan_document import PlannedPlacement
from moec.grammar.layer_numbers import numbered
from moec.passes.degrees.guest_slots import greedy_of
from moec.passes.guests.place_guests import guests_of
from moec.passes.search.candidate import Candidate


def planned_placements(plan: Candidate) -> list[PlannedPlacement]:
    """Of each kind of layers with slots."""
    layers = {block.name: list[int]() for block in plan.program.blocks if block.tables}
    if not layers:
        return []
    from moec.passes.guests.layer_time import layer_times

    for layer in plan.program.layers:
        if layer.body in layers:
            layers[layer.body].append(layer.number)
    times, moves = layer_times(plan.program, plan.spec), greedy_of(plan.spec) is not None
    return [
        PlannedPlacement(
            layers=numbers,
            row_s=times[body].row + times[body].sent,
            guest_s=times[body].guest if guests_of(plan.program.block(body)) else None,
            move_s=times[body].move if moves else None,
        )
        for body, numbers in layers.items()
    ]


def placement_lines(placements: list[PlannedPlacement]) -> Iterator[str]:
    """How many rows a guest and a move have to take from the busiest rank."""
    for number, placed in enumerate(placements):
        words = list[str]()
        if placed.guest_s is not None:
            words.append(
                f"a guest takes {placed.guest_s:.3g} s of a step, as {placed.guest_s / placed.row_s:,.0f} rows"
            )
        if placed.move_s is not None:
            words.append(
                f"an expert that moves {placed.move_s:.3g} s once, as {placed.move_s / placed.row_s:,.0f} rows"
            )
        where = f" in {numbered(placed.layers)}" if len(placements) > 1 else ""
        yield f"  {'adapt' if number == 0 else '':9}{', '.join(words)}{where}"

"""The maps under which a plan is verified: each layer's slots, in which a job may have any experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moec.passes.guests.place_guests import slot_shape
from moec.passes.ir import Program
from moec.runtime.weights.slots import slots_in_order, table_of

RANDOM_MAPS = 10
"""At least so many random maps of each body are compared, beside those of `_extreme`."""

EMPTY = 0.25
"""The share of empty slots in a random map."""

Maps = Mapping[int, Tensor]
"""The table of each layer with slots, int64 [2, ranks, slots of a rank]: experts and shares of rows."""


def guest_maps(program: Program, seed: int, *, moves: bool = False) -> list[Maps]:
    """The maps of each step: so many steps that the layers of each body, which take turns, have its extreme maps and
    `RANDOM_MAPS` others. Every second layer has shares of rows, in the next step the others. `moves`: homes are random
    too."""
    shapes = {
        layer.number: (layer.body, shape) for layer in program.layers if (shape := slot_shape(program.body(layer)))
    }
    generator = torch.Generator().manual_seed(seed)
    extreme = {body: [*_extreme(*shape, generator)] for body, shape in shapes.values()}
    layers = Counter(body for body, _ in shapes.values())
    steps = max((-(-(RANDOM_MAPS + len(extreme[body])) // number) for body, number in layers.items()), default=0)
    maps = list[Maps]()
    for step in range(steps):
        tables = dict[int, Tensor]()
        for place, (layer, (body, shape)) in enumerate(shapes.items()):
            slots = extreme[body].pop() if extreme[body] else _random(*shape, generator)
            slots = _moved(slots, shape.experts, generator) if moves else slots
            in_shares = (step + place) % 2
            tables[layer] = _in_shares(slots, shape.experts, generator) if in_shares else table_of(slots)
        maps.append(tables)
    return maps


def _extreme(ranks: int, experts: int, guests: int, generator: torch.Generator) -> Iterator[Tensor]:
    """One expert on every rank; the experts of one rank on all others, as many as have room; one guest in all, in its
    rank's last slot."""
    if not guests:
        return
    own = experts // ranks
    expert = int(torch.randint(experts, (), generator=generator))
    for number in sorted({1, min(own, guests)}):
        slots = _empty(ranks, experts, guests)
        first = expert // own * own if number > 1 else expert
        for rank in (rank for rank in range(ranks) if rank != expert // own):
            slots[rank, own : own + number] = torch.arange(first, first + number)
        yield slots
    slots = _empty(ranks, experts, guests)
    slots[(expert // own + 1) % ranks, -1] = expert
    yield slots


def _in_shares(slots: Tensor, experts: int, generator: torch.Generator) -> Tensor:
    """The table with random shares, of which some are 0: these copies get no row. Every expert has one at home."""
    shares = torch.randint(0, 4, slots.shape, generator=generator)
    shares[:, : experts // len(slots)] += 1
    return torch.stack([slots, torch.where(slots >= 0, shares, 0)])


def _random(ranks: int, experts: int, guests: int, generator: torch.Generator) -> Tensor:
    slots, own = _empty(ranks, experts, guests), experts // ranks
    for rank in range(ranks):
        others = torch.tensor([e for e in range(experts) if e // own != rank])
        chosen = others[torch.randperm(len(others), generator=generator)[:guests]]
        is_empty = torch.rand(len(chosen), generator=generator) < EMPTY
        slots[rank, own : own + len(chosen)] = torch.where(is_empty, -1, chosen)
    return slots


def _moved(slots: Tensor, experts: int, generator: torch.Generator) -> Tensor:
    """The same slots for experts in another order."""
    return torch.cat([torch.randperm(experts, generator=generator), torch.tensor([-1])])[slots]


def _empty(ranks: int, experts: int, guests: int) -> Tensor:
    return torch.cat([slots_in_order(ranks, experts), torch.full((ranks, guests), -1)], 1)

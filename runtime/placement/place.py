"""The layers of a plan whose experts may be elsewhere, and what is known of them without a model."""

from __future__ import annotations

from dataclasses import dataclass

from moec.codegen.plan import Plan
from moec.passes.guests.place_guests import guest_bytes, guests_of
from moec.passes.ir.mesh import group_name


@dataclass(frozen=True, slots=True)
class Place:
    """A layer: its experts, the lists of ranks of its groups of `ep`, and the slots of a rank for guests."""

    number: int
    experts: int
    groups: tuple[tuple[int, ...], ...]
    guests: int
    group: str
    body: str
    bytes: int
    """Of one guest in a step: its weights, and its gradients in fp32."""

    @property
    def ranks(self) -> int:
        return len(self.groups[0])

    @property
    def own(self) -> int:
        """The experts that are at home on a rank."""
        return self.experts // self.ranks

    @property
    def shape(self) -> tuple[int, int]:
        """Of the slots of all ranks."""
        return self.ranks, self.own + self.guests

    def position(self, rank: int) -> int:
        """The place of a rank in its group."""
        return next(ranks.index(rank) for ranks in self.groups if rank in ranks)


def places_of(plan: Plan) -> list[Place]:
    """The layers with slots."""
    layers = (layer.number for layer in plan.program.layers if plan.program.body(layer).tables)
    return [_place_of(plan, number) for number in layers]


def _place_of(plan: Plan, number: int) -> Place:
    layer = plan.program.layers[number]
    block, mesh = plan.program.body(layer), plan.expert_meshes[number]
    _, ranks, of_rank = (int(dim) for dim in block.tables[0].shape)
    guests = guests_of(block)
    groups = tuple(tuple(ranks) for ranks in mesh.groups("ep"))
    experts = ranks * (of_rank - guests)
    return Place(number, experts, groups, guests, group_name("ep", block.experts), block.name, guest_bytes(block))

"""The layers of a plan whose experts may be elsewhere, and what is known of them without a model."""

from __future__ import annotations

from dataclasses import dataclass

from moec.codegen.plan import Plan
from moec.passes.guests.place_guests import SlotShape, guest_bytes, slot_shape
from moec.passes.ir import Block
from moec.passes.ir.mesh import group_name


@dataclass(frozen=True, slots=True)
class Place:
    """A layer: its slots, the ranks of each group of `ep`, the name of that group, and the layer's block."""

    number: int
    shape: SlotShape
    groups: tuple[tuple[int, ...], ...]
    group: str
    body: str
    bytes: int
    """Of one guest in a step: its weights, and its gradients in fp32."""

    @property
    def own(self) -> int:
        """The experts that are at home on a rank."""
        return self.shape.experts // self.shape.ranks

    @property
    def table_shape(self) -> tuple[int, int]:
        """The ranks of a group, and the slots of a rank: its own experts', then those for guests."""
        return self.shape.ranks, self.own + self.shape.guests

    def position(self, rank: int) -> int:
        """The place of a rank in its group."""
        return next(ranks.index(rank) for ranks in self.groups if rank in ranks)


def places_of(plan: Plan) -> list[Place]:
    """The layers with slots."""
    bodies = ((layer.number, plan.program.body(layer)) for layer in plan.program.layers)
    return [_place_of(plan, number, body, shape) for number, body in bodies if (shape := slot_shape(body)) is not None]


def _place_of(plan: Plan, number: int, body: Block, shape: SlotShape) -> Place:
    groups = tuple(tuple(ranks) for ranks in plan.expert_meshes[number].groups("ep"))
    return Place(number, shape, groups, group_name("ep", body.experts), body.name, sum(guest_bytes(body)))

"""Chooses the guests of a model's layers again from time to time, by the loads of the steps before.

After every `every`-th step ranks gather the rows of their tokens by expert. Each rank then chooses for its share of the
layers while the next step runs, and before the step after that ranks exchange what they chose: a choice computes with
floats, and must be the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moec.codegen.plan import Plan
from moec.passes.degrees.guest_slots import placements
from moec.passes.guests.assignment import quotas_of, slot_numbers
from moec.passes.guests.choice import Slots, choose_guests
from moec.passes.guests.layer_time import layer_times
from moec.passes.guests.place_guests import guest_bytes, guests_of
from moec.passes.guests.split import split
from moec.passes.ir import OutputKey
from moec.passes.ir.mesh import group_name
from moec.runtime.job.guest_choices import GuestChoices
from moec.runtime.model.plan_layer import layer_inside
from moec.runtime.ops.dense_collectives import all_gather_single
from moec.runtime.ranks.groups import HOST, STAGE
from moec.runtime.ranks.watch import collective
from moec.runtime.refused_derivatives import unwrapped
from moec.runtime.weights.guests import Guests, homes, with_shares

DELAY = 1
"""Whole steps between the loads and the step for which guests are chosen: the choice is computed beside them."""


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
        return self.experts // self.ranks

    @property
    def shape(self) -> tuple[int, int]:
        """Of the slots of all ranks."""
        return self.ranks, self.own + self.guests


class GuestPolicy:
    """The guests of the layers of one model of a job. Every rank of the job has one, and calls it at the same times.

    `steps` gives the number of the step that runs, from 1. `choices`: the recorded choices, which it repeats.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        job: str,
        device: torch.device,
        steps: Callable[[], int],
        choices: GuestChoices | None = None,
    ) -> None:
        self._plan, self._rank, self._job, self._ranks, self._device = plan, rank, job, plan.world_size, device
        self._step, self._choices = steps, choices
        self._places = places_of(plan)
        self._words, self._split = placements(plan.spec), plan.spec.adapt.split if plan.spec.adapt else "fresh"
        self._every = min(word.every for word in self._words)
        self._times = layer_times(plan.program, plan.spec)
        self._loads: dict[int, Tensor] = {}
        self._counted, self._repeated = 0, 0
        self._chosen: deque[tuple[int, Future[dict[int, Any]]]] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # the guests of a copy of a model stay what they are

    def add(self, results: Mapping[OutputKey, Any]) -> None:
        """Adds the rows of a forward pass in training to the loads of the step."""
        for place in self._places:
            counts = results.get(("counts", place.number, None))
            if counts is not None:
                earlier = self._loads.get(place.number)
                self._loads[place.number] = unwrapped(counts if earlier is None else earlier + counts)

    def begin_step(self, layers: nn.ModuleList) -> None:
        """Gives the layers their new guests, if some were chosen for this step. A collective of all ranks then."""
        step, recorded = self._step(), {} if self._choices is None else self._choices.steps
        if step < self._repeated:  # a script has begun again at an earlier step
            self._chosen.clear()
            self._loads.clear()
            self._counted = self._repeated = 0
            self._give(layers, {p.number: with_shares(homes(p.ranks, p.experts)) for p in self._places})
        for number in sorted(number for number in recorded if self._repeated < number <= step):
            self._give(layers, recorded[number])
        self._repeated = step
        while self._chosen and self._chosen[0][0] <= step:
            slots = self._exchanged(self._chosen.popleft()[1])
            self._give(layers, slots)
            if self._choices is not None:
                self._choices.add(step, slots, writes=self._rank == 0)

    def end_step(self) -> None:
        """Counts a step; after every `every`-th, gathers loads and begins to choose. A collective of all ranks then."""
        step = self._step()
        self._counted += 1
        if step % self._every and self._counted < self._every:  # another model of the job may take every second step
            return
        due, last = step + DELAY + 1, 0 if self._choices is None else self._choices.last
        if due > last:
            executor = ThreadPoolExecutor(1, "guests")
            self._chosen.append((due, executor.submit(self._choose, self._gathered(), self._counted)))
            executor.shutdown(wait=False)
        self._loads.clear()
        self._counted = 0

    def figures(self, layers: nn.ModuleList, loads: Mapping[int, Tensor]) -> dict[str, dict[int, float]]:
        """Of each layer: its guests, the bytes that all ranks send of them in a step, and rows of the busiest rank over
        the mean, at home alone and as they were split. `loads`: rows of each expert, of all groups together."""
        found: dict[str, dict[int, float]] = {"guests": {}, "guest_bytes": {}, "home_rows": {}, "rows": {}}
        for place in self._places:
            layer, rows = layer_inside(layers[place.number]), loads.get(place.number)
            if layer is None or rows is None:
                continue
            counts, at_home = rows.numpy(), homes(place.ranks, place.experts).numpy()
            table = with_shares(homes(place.ranks, place.experts)) if layer.guests is None else layer.guests.table
            slots, shares = table.numpy()
            numbers = slot_numbers(slots, place.experts)
            guests = int((numbers >= 0).sum()) - place.experts
            found["guests"][place.number] = guests
            found["guest_bytes"][place.number] = guests * len(place.groups) * place.bytes
            found["home_rows"][place.number] = over_mean(counts[at_home].sum(1))
            found["rows"][place.number] = over_mean(quotas_of(counts, shares, numbers).sum(0))
        return found

    # ---- choosing --------------------------------------------------------------------------------------

    def _gathered(self) -> dict[int, Tensor]:
        """The rows of each rank's tokens by expert [ranks, experts], by layer."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        own = [self._loads.get(p.number, nothing.expand(p.experts)).flatten() for p in self._places]
        flat = torch.cat(own)
        gathered = flat.new_empty((self._ranks, flat.numel()))
        with collective("gather_loads", self._job + STAGE, "the choice of guests") as peers:
            all_gather_single(gathered.view(-1), flat, group=peers)
        parts = torch.split(gathered.cpu(), [p.experts for p in self._places], 1)
        return {place.number: part for place, part in zip(self._places, parts, strict=True)}

    def _choose(self, counts: Mapping[int, Tensor], steps: int) -> dict[int, Any]:
        """The tables of this rank's share of the layers, by their numbers."""
        chosen = dict[int, Any]()
        for place in self._places[self._rank :: self._ranks]:
            rows = counts[place.number].numpy()[np.array(place.groups)].sum(0) // (steps * len(place.groups))
            of_all = sum(self._most(word, place) for word in self._words)
            home = np.arange(place.experts) // place.own
            found = choose_guests(rows, home, Slots(place.guests, of_all, passed_on=False), self._times[place.body])
            chosen[place.number] = self._table_of(found.copies, rows.sum(0), place)
        return chosen

    def _table_of(self, copies: Any, rows: Any, place: Place) -> Any:
        """The table of `copies` [experts, ranks]: own experts, then guests in their order; and shares, as the file's
        `split` says. An expert without rows has its share at home."""
        slots = np.full(place.shape, -1, np.int64)
        slots[:, : place.own] = homes(place.ranks, place.experts).numpy()
        for rank in range(place.ranks):
            guests = [expert for expert in np.flatnonzero(copies[:, rank]).tolist() if expert // place.own != rank]
            slots[rank, place.own : place.own + len(guests)] = guests
        shares = np.zeros(place.shape, np.int64)
        if self._split == "even":
            shares[slots >= 0] = 1
        elif self._split == "old":
            quotas, experts, ranks = split(rows, copies), np.arange(place.experts), np.arange(place.ranks)
            quotas[experts, experts // place.own] += rows == 0
            shares = np.where(slots >= 0, quotas[slots, ranks[:, None]], 0)
        return np.stack([slots, shares])

    @staticmethod
    def _most(word: Any, place: Place) -> int:
        return int(word.slots) if word.word == "replicate" else int(word.most) * (place.ranks - 1)

    def _exchanged(self, future: Future[dict[int, Any]]) -> dict[int, Tensor]:
        """The tables of all layers, each from the rank that chose it. Raises on every rank if one could not choose."""
        error = future.exception()
        chosen = {} if error is not None else future.result()
        flat = [
            torch.from_numpy(chosen[p.number] if p.number in chosen else np.zeros((2, *p.shape), np.int64)).flatten()
            for p in self._places
        ]
        total = torch.cat([*flat, torch.tensor([int(error is not None)])])
        with collective("exchange_guests", self._job + HOST, "the choice of guests") as peers:
            dist.all_reduce(total, group=peers)
        *parts, failed = torch.split(total, [*(part.numel() for part in flat), 1])
        if int(failed):
            raise RuntimeError(f"{int(failed)} ranks could not choose guests") from error
        return {p.number: part.view(2, *p.shape) for p, part in zip(self._places, parts, strict=True)}

    def _give(self, layers: nn.ModuleList, slots: Mapping[int, Tensor]) -> None:
        for place in self._places:
            layer, chosen = layer_inside(layers[place.number]), slots.get(place.number)
            if layer is not None and chosen is not None:
                has_guests = bool((chosen[0, :, place.own :] >= 0).any())
                layer.guests = self._guests(place, chosen, layer) if has_guests else None

    def _guests(self, place: Place, table: Tensor, layer: Any) -> Guests:
        position = next(ranks.index(self._rank) for ranks in place.groups if self._rank in ranks)
        site = f"layer {place.number}"
        return Guests(table, position, place.own, layer.hosted, self._job + place.group, site)


def places_of(plan: Plan) -> list[Place]:
    """The layers with room for guests."""
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


def over_mean(rows: Any) -> float:
    """The largest of some numbers of rows over their mean; 1 without rows."""
    return float(rows.max() / rows.mean()) if rows.any() else 1.0

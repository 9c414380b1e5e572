"""Chooses where the experts of a model are, again from time to time, by the loads of the steps before.

After every `every`-th step ranks gather the rows of their tokens by expert. Each rank then chooses for its share of the
layers while the next step runs, and before the step after that ranks exchange what they chose: a choice computes with
floats, and must be the same on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moec.codegen.plan import Plan
from moec.grammar.checking.guest_rules import placed_words
from moec.grammar.layer_numbers import numbered
from moec.passes.degrees.guest_slots import moves_of
from moec.passes.guests.assignment import quotas_of, slot_numbers
from moec.passes.ir import OutputKey
from moec.runtime.model.plan_layer import layer_inside
from moec.runtime.ops.dense_collectives import all_gather_single
from moec.runtime.placement.choices import PlacementChoices
from moec.runtime.placement.choosing import Choice, Choices, Chooser, Homes, Loads, sum_of
from moec.runtime.placement.guard import STEPS, Guard, is_slower
from moec.runtime.placement.model_homes import ModelHomes
from moec.runtime.placement.place import Place, places_of
from moec.runtime.ranks.checks import Checks
from moec.runtime.ranks.groups import HOST, STAGE
from moec.runtime.ranks.watch import collective
from moec.runtime.refused_derivatives import unwrapped
from moec.runtime.script import warn
from moec.runtime.weights.guests import Guests
from moec.runtime.weights.slots import slots_in_order, with_shares

NANO = 10**9
"""Seconds travel as whole numbers, in the same sum as the tables."""

DELAY = 1
"""Whole steps between the loads and the step for which experts are placed: the choice is computed beside them."""


FIGURES = ("guests", "guest_bytes", "moved", "home_rows", "rows", "predicted_seconds", "predicted_unplaced")
"""The names of the figures of each layer."""


class PlacementPolicy:
    """Where experts of the layers of one model of a job are. Every rank has one, and calls it at the same times.

    `steps` gives the number of the step that runs, from 1. `choices`: the recorded choices, which it repeats.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        job: str,
        device: torch.device,
        steps: Callable[[], int],
        choices: PlacementChoices | None = None,
    ) -> None:
        self._plan, self._rank, self._job, self._ranks, self._device = plan, rank, job, plan.world_size, device
        self._step, self._choices = steps, choices
        self._places = places_of(plan)
        self._every = min(word.every for word in placed_words(plan.spec))
        self._chooser = Chooser(plan, self._places[rank :: self._ranks])
        self.homes: ModelHomes | None = None
        """The homes of its model, if they move."""
        self._begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # nothing chooses for a copy of a model

    def _begin_anew(self) -> None:
        """Experts at home, and nothing chosen."""
        self._tables = {p.number: with_shares(slots_in_order(p.ranks, p.experts)) for p in self._places}
        self._chooser.horizons.clear()
        self._loads: dict[int, Tensor] = {}
        self._since_moves = list[Loads]()
        self._gathered_at: int | None = None
        self._counted = self._repeated = 0
        self._chosen: deque[tuple[int, Future[Choices]]] = deque()
        self._guard, self._undone = Guard(), 0
        self._predicted: dict[int, tuple[float, float]] = {}
        """Seconds of a step of layers that choices have predicted: as placed, and with experts in their first homes."""

    def homes_of(self, model: nn.Module, layers: nn.ModuleList, checks: Checks) -> ModelHomes | None:
        """Lets the experts of this model move, if the file says so."""
        if moves_of(self._plan.spec) is not None:
            self.homes = ModelHomes(model, layers, self._places, self._rank, self._job, checks)
        return self.homes

    def add(self, results: Mapping[OutputKey, Any]) -> None:
        """Adds the rows of a forward pass in training to the loads of the step."""
        for place in self._places:
            counts = results.get(("counts", place.number, None))
            if counts is not None:
                earlier = self._loads.get(place.number)
                self._loads[place.number] = unwrapped(counts if earlier is None else earlier + counts)

    def begin_step(self, layers: nn.ModuleList) -> None:
        """Places experts as was chosen for this step. A collective of all ranks then."""
        self._guard.stop()
        step, recorded = self._step(), {} if self._choices is None else self._choices.steps
        if step < self._repeated:  # a script has begun again at an earlier step
            self._begin_anew()
        for number in sorted(number for number in recorded if self._repeated < number <= step):
            self._tables |= recorded[number]
        self._repeated = step
        while self._chosen and self._chosen[0][0] <= step:
            self._take(self._exchanged(self._chosen.popleft()[1]), step)
        if self._guard.is_due:
            self._judge(step)
        self._give(layers)
        self._guard.start()

    def end_step(self) -> None:
        """Counts a step; after every `every`-th, gathers loads and begins to choose. A collective of all ranks then."""
        step = self._step()
        self._counted += 1
        if step % self._every and self._counted < self._every:  # another model of the job may take every second step
            return
        recorded = {} if self._choices is None else self._choices.steps
        due, last = step + DELAY + 1, max(recorded, default=0)
        if self.homes is not None:
            self.homes.require_movable_once()
        if due > last:
            loads = Loads(self._gathered(), self._counted)
            moves = self._loads_of_moves(step, loads)
            executor = ThreadPoolExecutor(1, "placement")
            before = self._chosen[-1][1] if self._chosen else None
            tables = dict(self._tables)
            for number in sorted(number for number in recorded if number > step):  # before the choice that begins now
                tables |= recorded[number]
            homes = {p.number: tables[p.number][0, :, : p.own].numpy() for p in self._places}
            self._chosen.append((due, executor.submit(self._choose, before, loads, homes, moves)))
            executor.shutdown(wait=False)
        self._loads.clear()
        self._counted = 0

    def figures(self, layers: nn.ModuleList, loads: Mapping[int, Tensor]) -> dict[str, Any]:
        """The median seconds of the last steps, and of each layer: its guests, the bytes that all ranks send of them in
        a step, experts whose home is not their first, rows of the busiest rank over the mean, at home alone and as
        they were split, and the predicted seconds of a step, as placed and with experts in their first homes. `loads`:
        rows of each expert, of all groups together."""
        found: dict[str, dict[int, float]] = {name: {} for name in FIGURES}
        for place in self._places:
            layer, rows = layer_inside(layers[place.number]), loads.get(place.number)
            if layer is None or rows is None:
                continue
            counts, table = rows.numpy(), self._tables[place.number]
            if layer.guests is None:
                table = with_shares(table[0, :, : place.own])
            slots, shares = table.numpy()
            numbers = slot_numbers(slots, place.experts)
            guests = int((numbers >= 0).sum()) - place.experts
            found["guests"][place.number] = guests
            first = np.arange(place.ranks)[:, None]
            found["moved"][place.number] = int((slots[:, : place.own] // place.own != first).sum())
            found["guest_bytes"][place.number] = guests * len(place.groups) * place.bytes
            found["home_rows"][place.number] = over_mean(counts[slots[:, : place.own]].sum(1))
            found["rows"][place.number] = over_mean(quotas_of(counts, shares, numbers).sum(0))
            if place.number in self._predicted:
                for name, predicted in zip(FIGURES[-2:], self._predicted[place.number], strict=True):
                    found[name][place.number] = predicted
        measured = {} if self._guard.median is None else {"step_seconds": self._guard.median}
        measured |= {} if self.homes is None else {"undone": self._undone}
        return {**measured, **{name: values for name, values in found.items() if values}}

    # ---- choosing --------------------------------------------------------------------------------------

    def _gathered(self) -> dict[int, Tensor]:
        """The rows of each rank's tokens by expert [ranks, experts], by layer."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        own = [self._loads.get(p.number, nothing.expand(p.experts)).flatten() for p in self._places]
        flat = torch.cat(own)
        gathered = flat.new_empty((self._ranks, flat.numel()))
        with collective("gather_loads", self._job + STAGE, "the placement of experts") as peers:
            all_gather_single(gathered.view(-1), flat, group=peers)
        parts = torch.split(gathered.cpu(), [p.experts for p in self._places], 1)
        return {place.number: part for place, part in zip(self._places, parts, strict=True)}

    def _loads_of_moves(self, step: int, loads: Loads) -> Loads | None:
        """The loads by which a choice after this step moves experts, those since the last such choice; None if they
        stay. They may move where `every` divides a step since the last loads, if the guard can watch them."""
        word, adapt = moves_of(self._plan.spec), self._plan.spec.adapt
        if word is None or adapt is None:
            return None
        self._since_moves.append(loads)
        every = max(word.every, DELAY + 1)
        can_watch = not adapt.clock or (self._guard.timed + DELAY + 1 >= STEPS and not self._guard.moved)
        before = step - loads.steps if self._gathered_at is None else self._gathered_at
        self._gathered_at = step
        if step // every == before // every or not can_watch:
            return None
        moves, self._since_moves = sum_of(self._since_moves), []
        return moves

    def _choose(self, before: Future[Choices] | None, loads: Loads, homes: Homes, moves: Loads | None) -> Choices:
        """What this rank chooses for its share of the layers, after the choices `before`, if they are under way."""
        if before is not None:
            own = {place.number: place.own for place in self._places}
            homes = homes | {number: choice.table[0, :, : own[number]] for number, choice in before.result().items()}
        return self._chooser.choices(loads, homes, moves)

    def _exchanged(self, future: Future[Choices]) -> dict[int, Choice]:
        """The choices for all layers, each from the rank that made it. Raises on every rank if one could not."""
        error = future.exception()
        chosen = {} if error is not None else future.result()
        flat = [self._flat(place, chosen.get(place.number)) for place in self._places]
        all_chosen = self._summed(torch.cat([*flat, torch.tensor([int(error is not None)])]))
        *parts, failed = torch.split(all_chosen, [*map(len, flat), 1])
        if int(failed):
            raise RuntimeError(f"{int(failed)} ranks could not place experts") from error
        return {
            place.number: Choice(part[:-2].view(2, *place.shape), *(part[-2:] / NANO).tolist())
            for place, part in zip(self._places, parts, strict=True)
        }

    def _flat(self, place: Place, choice: Choice | None) -> Tensor:
        """A choice in whole numbers; zeros for that of another rank."""
        if choice is None:
            return torch.zeros(2 * math.prod(place.shape) + 2, dtype=torch.int64)
        seconds = torch.tensor([round(choice.seconds * NANO), round(choice.unplaced * NANO)])
        return torch.cat([torch.from_numpy(choice.table).flatten(), seconds])

    def _summed(self, values: Tensor) -> Tensor:
        """The sum of what all ranks give."""
        with collective("exchange_placement", self._job + HOST, "the placement of experts") as peers:
            dist.all_reduce(values, group=peers)
        return values

    # ---- placing ---------------------------------------------------------------------------------------

    def _homes(self, place: Place) -> Tensor:
        """The slots at home of a layer [ranks, experts of a rank]."""
        return self._tables[place.number][0, :, : place.own]

    def _take(self, choices: Choices, step: int) -> None:
        """Takes what was chosen from this step on, and watches moves by the clock, if the file says so."""
        before = {place.number: self._homes(place) for place in self._places}
        self._record({number: choice.table for number, choice in choices.items()}, step)
        self._predicted |= {number: (choice.seconds, choice.unplaced) for number, choice in choices.items()}
        moved = {p.number: before[p.number] for p in self._places if not torch.equal(before[p.number], self._homes(p))}
        if moved and self._plan.spec.adapt is not None and self._plan.spec.adapt.clock:
            self._guard.watch(moved)

    def _judge(self, step: int) -> None:
        """Undoes the moves that are watched if steps take longer since, and asks more of the next ones."""
        before, after = (self._summed(torch.tensor(self._guard.medians(), dtype=torch.float64)) / self._ranks).tolist()
        moved = self._guard.end()
        if not is_slower(before, after):
            return
        self._chosen.clear()  # chosen for the homes that are undone
        self._undone += 1
        self._guard.forget()
        tables = {}
        for place in (place for place in self._places if place.number in moved):
            homes, guests = moved[place.number], self._tables[place.number][0, :, place.own :]
            at_home = (guests[:, :, None] == homes[:, None]).any(2)
            tables[place.number] = with_shares(torch.cat([homes, torch.where(at_home, -1, guests)], 1))
            self._chooser.halve_horizon(place.number)
            self._predicted.pop(place.number, None)
        self._record(tables, step)
        if self._rank == 0:
            warn(
                f"experts of {numbered(list(moved))} are back where they were {STEPS} steps ago: a step took "
                f"{before:.3g} s before they moved and {after:.3g} s since; their next move has to pay in half the time"
            )

    def _record(self, tables: Mapping[int, Tensor], step: int) -> None:
        """Has these tables from this step on, and adds them to the file of choices."""
        self._tables |= tables
        if self._choices is not None:
            self._choices.add(step, tables, writes=self._rank == 0)

    def _give(self, layers: nn.ModuleList) -> None:
        """Places the experts of all layers as their tables say."""
        if self.homes is not None:
            self.homes.move({place.number: self._homes(place) for place in self._places})
        for place in self._places:
            layer, table = layer_inside(layers[place.number]), self._tables[place.number]
            if layer is None:
                continue
            homes = self._homes(place) if self.homes is None else self.homes.of_layer(place.number).slots
            has_guests, guests = bool((table[0, :, place.own :] >= 0).any()), layer.guests
            if not has_guests:
                layer.guests = None
            elif guests is None or guests.table is not table or (self.homes is not None and guests.homes is not homes):
                group, site = self._job + place.group, f"layer {place.number}"
                layer.guests = Guests(table, place.position(self._rank), homes, layer.hosted, group, site)


def over_mean(rows: Any) -> float:
    """The largest of some numbers of rows over their mean; 1 without rows."""
    return float(rows.max() / rows.mean()) if rows.any() else 1.0

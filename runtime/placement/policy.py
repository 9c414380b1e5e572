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

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moec.codegen.plan import Plan
from moec.grammar.checking.guest_rules import placed_words
from moec.grammar.layer_numbers import numbered
from moec.passes.degrees.guest_slots import greedy_of
from moec.passes.ir import OutputKey
from moec.runtime.model.plan_layer import layer_inside
from moec.runtime.placement.choices import PlacementChoices
from moec.runtime.placement.choosing import AtHome, Choice, Choices, Chooser
from moec.runtime.placement.figures import layer_figures
from moec.runtime.placement.guard import STEPS, MoveGuard, is_slower
from moec.runtime.placement.loads import CountedLoads, Loads
from moec.runtime.placement.model_homes import ModelHomes
from moec.runtime.placement.place import Place, places_of
from moec.runtime.ranks.checks import Checks
from moec.runtime.ranks.groups import HOST
from moec.runtime.ranks.watch import collective
from moec.runtime.script import warn
from moec.runtime.weights.guests import Guests
from moec.runtime.weights.slots import slots_in_order, table_of, with_homes

NANO = 10**9
"""Seconds travel as whole numbers, in the same sum as the tables."""

AHEAD = 2
"""Steps from the last of the loads to the first with what is chosen by them; it is chosen beside the one between."""


class PlacementPolicy:
    """Where experts of the layers of one model of a job are. Every rank has one, and calls it at the same times.

    `step` gives the number of the step that runs, from 1. `choices`: the recorded choices, which it repeats.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        job: str,
        device: torch.device,
        step: Callable[[], int],
        choices: PlacementChoices | None = None,
    ) -> None:
        self._plan, self._rank, self._job, self._step, self._choices = plan, rank, job, step, choices
        self._places = places_of(plan)
        assert plan.spec.adapt is not None
        self._greedy, self._clock = greedy_of(plan.spec), plan.spec.adapt.clock
        self._every = min(word.every for word in placed_words(plan.spec))
        self._chooser = Chooser(plan, self._places[rank :: plan.world_size])
        self._loads = CountedLoads(self._places, plan.world_size, job, device)
        self.homes: ModelHomes | None = None
        """The homes of its model, if they move."""
        self._begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # nothing chooses for a copy of a model

    def _begin_anew(self) -> None:
        """Experts at home, and nothing chosen."""
        self._tables = {p.number: table_of(slots_in_order(p.shape.ranks, p.shape.experts)) for p in self._places}
        self._chooser.horizons.clear()
        self._loads.clear()
        self._since_moves: Loads | None = None
        self._gathered_at: int | None = None
        self._repeated, self._has_ended = 0, False
        self._chosen: deque[tuple[int, Future[Choices]]] = deque()
        self._guard, self._undone = MoveGuard(), 0
        self._predicted: dict[int, tuple[float, float]] = {}
        """Seconds of a step of layers that choices have predicted: as placed, and with experts in their first homes."""

    def let_move(self, model: nn.Module, layers: nn.ModuleList, checks: Checks, number: int) -> ModelHomes | None:
        """Lets the experts of this model move, the job's `number`-th, if the file says so."""
        if self._greedy is not None:
            self.homes = ModelHomes(model, layers, self._places, self._rank, self._job, checks, number)
        return self.homes

    def add(self, results: Mapping[OutputKey, Any]) -> None:
        """Adds the rows of a forward pass in training to the loads of the step."""
        self._loads.add(results)

    def begin_step(self, layers: nn.ModuleList) -> None:
        """Places experts as was chosen for this step. A collective of all ranks then."""
        self._guard.stop()
        step = self._step()
        if step < self._repeated or (step == self._repeated and self._has_ended):
            self._begin_anew()  # a script has begun again at an earlier step
        self._loads.begin_step()
        if self._choices is not None and (repeated := self._choices.between(self._repeated, step)):
            self._tables |= repeated
            self._guard.forget()
        self._repeated, self._has_ended = step, False
        while self._chosen and self._chosen[0][0] <= step:
            self._take(self._exchanged(self._chosen.popleft()[1]), step)
        if self._guard.is_due:
            self._judge(step)
        self._give(layers)
        self._guard.start()

    def end_step(self) -> None:
        """Counts a step; after every `every`-th, gathers loads and begins to choose. A collective of all ranks then."""
        step = self._step()
        self._loads.end_step()
        self._has_ended = True
        # Another model of the job may take every second step.
        if step % self._every and self._loads.steps < self._every:
            return
        if self.homes is not None:
            self.homes.require_movable_once()
        if self._choices is None or step + AHEAD > self._choices.last:
            loads = self._loads.gathered()
            self._begin_to_choose(step, loads, self._loads_of_moves(step, loads))
        self._loads.clear()

    def figures(self, layers: nn.ModuleList, loads: Mapping[int, Tensor]) -> dict[str, Any]:
        """The median seconds of the last steps, how often moves were undone, and of each layer the figures of
        `layer_figures` and the predicted seconds of a step, as placed and with experts in their first homes. `loads`:
        rows of each expert, of all groups together."""
        found: dict[str, dict[int, float]] = {}
        for place in self._places:
            if layer_inside(layers[place.number]) is None or place.number not in loads:
                continue
            of_layer = layer_figures(place, self._tables[place.number], loads[place.number].numpy())
            if place.number in self._predicted:
                seconds, unplaced = self._predicted[place.number]
                of_layer |= {"predicted_seconds": seconds, "predicted_unplaced": unplaced}
            for name, figure in of_layer.items():
                found.setdefault(name, {})[place.number] = figure
        measured = {} if self._guard.median is None else {"step_seconds": self._guard.median}
        if self.homes is not None:
            measured |= {"undone": self._undone} | self.homes.figures()
        return measured | found

    # ---- choosing --------------------------------------------------------------------------------------

    def _loads_of_moves(self, step: int, loads: Loads) -> Loads | None:
        """The loads by which a choice after this step moves experts, those since the last such choice; None if they
        stay. They may move where `every` divides a step since the last loads, if the guard can watch them: enough steps
        are timed by then, which no choice of the file makes it forget."""
        if self._greedy is None:
            return None
        self._since_moves = loads if self._since_moves is None else self._since_moves.plus(loads)
        every = max(self._greedy.every, AHEAD)
        repeats = self._choices is not None and bool(self._choices.between(step, step + AHEAD))
        are_timed = self._guard.timed + AHEAD >= STEPS
        can_watch = not self._clock or (are_timed and not repeats and not self._guard.homes_before)
        before = step - loads.steps if self._gathered_at is None else self._gathered_at
        self._gathered_at = step
        if step // every == before // every or not can_watch:
            return None
        moves, self._since_moves = self._since_moves, None
        return moves

    def _begin_to_choose(self, step: int, loads: Loads, loads_of_moves: Loads | None) -> None:
        """Chooses beside the next step, from the homes as they will be then."""
        tables = self._tables if self._choices is None else self._tables | self._choices.between(step, step + AHEAD)
        homes = {p.number: tables[p.number][0, :, : p.own].numpy() for p in self._places}
        before = self._chosen[-1][1] if self._chosen else None
        executor = ThreadPoolExecutor(1, "placement")
        self._chosen.append((step + AHEAD, executor.submit(self._choose, before, loads, homes, loads_of_moves)))
        executor.shutdown(wait=False)

    def _choose(
        self, before: Future[Choices] | None, loads: Loads, at_home: AtHome, loads_of_moves: Loads | None
    ) -> Choices:
        """What this rank chooses for its share of the layers, after the choices `before`, if they are under way."""
        if before is not None:
            own = {place.number: place.own for place in self._places}
            at_home = at_home | {
                number: choice.table[0, :, : own[number]] for number, choice in before.result().items()
            }
        return self._chooser.choices(loads, at_home, loads_of_moves)

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
            place.number: Choice(part[:-2].view(2, *place.table_shape), *(part[-2:] / NANO).tolist())
            for place, part in zip(self._places, parts, strict=True)
        }

    def _flat(self, place: Place, choice: Choice | None) -> Tensor:
        """A choice in whole numbers; zeros for that of another rank."""
        if choice is None:
            return torch.zeros(2 * math.prod(place.table_shape) + 2, dtype=torch.int64)
        seconds = torch.tensor([round(choice.seconds * NANO), round(choice.unplaced * NANO)])
        return torch.cat([torch.from_numpy(choice.table).flatten(), seconds])

    def _summed(self, values: Tensor) -> Tensor:
        """The sum of what all ranks give."""
        with collective("exchange_placement", self._job + HOST, "the placement of experts") as peers:
            dist.all_reduce(values, group=peers)
        return values

    # ---- placing ---------------------------------------------------------------------------------------

    def _at_home(self, place: Place) -> Tensor:
        """The slots at home of a layer [ranks, experts of a rank]."""
        return self._tables[place.number][0, :, : place.own]

    def _take(self, choices: Choices, step: int) -> None:
        """Takes what was chosen from this step on, and watches moves by the clock, if the file says so."""
        before = {place.number: self._at_home(place) for place in self._places}
        self._record({number: choice.table for number, choice in choices.items()}, step)
        self._predicted |= {number: (choice.seconds, choice.unplaced) for number, choice in choices.items()}
        moved = {
            p.number: before[p.number] for p in self._places if not torch.equal(before[p.number], self._at_home(p))
        }
        if moved:
            if self._clock:
                self._guard.watch(moved)
            self._guard.forget()

    def _judge(self, step: int) -> None:
        """Undoes the moves that are watched if steps take longer since, and asks more of the next ones."""
        medians = torch.tensor(self._guard.medians(), dtype=torch.float64)
        before, after = (self._summed(medians) / self._plan.world_size).tolist()
        homes_before = self._guard.end()
        if not is_slower(before, after):
            return
        self._chosen.clear()  # chosen for the homes that are undone
        self._undone += 1
        self._guard.forget()
        tables = {number: with_homes(self._tables[number], homes) for number, homes in homes_before.items()}
        for number in tables:
            self._chooser.halve_horizon(number)
            self._predicted.pop(number, None)
        self._record(tables, step)
        if self._rank == 0:
            warn(
                f"experts of {numbered(list(tables))} are back where they were {STEPS} steps ago: a step took "
                f"{before:.3g} s before they moved and {after:.3g} s since; their next move has to pay in half of the "
                "`horizon`. Where steps vary by themselves, `clock = false` leaves this out"
            )

    def _record(self, tables: Mapping[int, Tensor], step: int) -> None:
        """Has these tables from this step on, and adds them to the file of choices."""
        self._tables |= tables
        if self._choices is not None:
            self._choices.add(step, tables, writes=self._rank == 0)

    def _give(self, layers: nn.ModuleList) -> None:
        """Places the experts of all layers as their tables say."""
        if self.homes is not None:
            self.homes.move({place.number: self._at_home(place) for place in self._places})
        for place in self._places:
            layer, table = layer_inside(layers[place.number]), self._tables[place.number]
            if layer is None:
                continue
            homes = self._at_home(place) if self.homes is None else self.homes.of_layer(place.number).slots
            has_guests, guests = bool((table[0, :, place.own :] >= 0).any()), layer.guests
            if not has_guests:
                layer.guests = None
            elif guests is None or guests.table is not table or (self.homes is not None and guests.homes is not homes):
                group, site = self._job + place.group, f"layer {place.number}"
                layer.guests = Guests(table, place.position(self._rank), homes, layer.of_experts, group, site)

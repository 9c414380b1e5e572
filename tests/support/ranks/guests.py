"""Training with other guests in every step, whatever they save."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from support.ranks.training import batches_of, own_part, train_as_rank
from torch import nn

import moec
from moec.codegen.plan import Plan
from moec.runtime.job.guest_policy import GuestPolicy
from moec.runtime.verify.guest_maps import guest_maps
from moec.runtime.weights.guests import Guests


class RandomGuests(GuestPolicy):
    """Every step has other guests: those under which plans are verified, first the extreme ones."""

    def begin_step(self, layers: nn.ModuleList) -> None:
        maps = guest_maps(self._plan.program, self._step())
        self._give(layers, maps[self._step() % len(maps)])

    def end_step(self) -> None:
        """Chooses nothing."""


def train_with_guests(plan: Plan, steps: int, compiled: str = "") -> dict[str, Any]:
    """`train_as_rank` with `RandomGuests`, and the number of graphs that were compiled."""
    with mock.patch("moec.runtime.job.job.GuestPolicy", RandomGuests):
        result = train_as_rank(plan, steps, compiled=compiled)
    return result | {"graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)}


def bytes_of_guests(plan: Plan, microbatches: int) -> tuple[int, int]:
    """The bytes that this rank sends of guests in a step, their gradients among them; and those of the elements of
    guests that it sends or has."""
    sent, elements, original = 0, 0, Guests._exchanged

    def exchanged(self: Guests, parts: Any, sends: Any, receives: Any, name: str) -> Any:
        nonlocal sent, elements
        rows = sum(map(len, sends))
        sent += rows * sum(part[0].nbytes for part in parts)
        elements += rows * sum(part[0].numel() for part in parts)
        return original(self, parts, sends, receives, name)

    with (
        mock.patch("moec.runtime.job.job.GuestPolicy", RandomGuests),
        mock.patch.object(Guests, "_exchanged", exchanged),
        moec.launch(plan, device="cpu") as job,
    ):
        tokens = torch.randint(32, (8 // job.data_size, 8))
        job.step(job.build(seed=1), tokens, tokens, microbatches=microbatches)
    return sent, elements


def train_with_choices(plan: Plan, choices: str, steps: int) -> dict[str, Any]:
    """The losses of a run that writes its choices to a file, or repeats those of the file, and its last guests."""
    with moec.launch(plan, device="cpu", choices=choices) as job:
        model, losses = job.build(seed=1), []
        optimizer = job.optimizer(model)
        with torch.no_grad():
            for layer in model.layers[1:]:
                layer.moe.gate.weight.to_local()[3] *= 30  # one busy expert
        for tokens, labels in batches_of(plan.spec, steps):
            losses.append(job.step(model, *own_part(job, tokens, labels)).item())
            optimizer.step()
            optimizer.zero_grad()
        guests = [None if layer.guests is None else layer.guests.slots.tolist() for layer in model.layers]
    return {"losses": losses, "guests": guests}

"""Training with other guests in every step, whatever they save."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
from support.ranks.training import batches_of, own_part, train_as_rank
from torch import nn

import moec
from moec.codegen.plan import Plan
from moec.runtime.placement.guard import MoveGuard
from moec.runtime.placement.policy import PlacementPolicy
from moec.runtime.verify.guest_maps import guest_maps
from moec.runtime.weights import guest_routes
from moec.runtime.weights.masters import local_part


class RandomGuests(PlacementPolicy):
    """Every step has other guests, and other homes if these may move: those under which plans are verified, first the
    extreme ones."""

    def begin_step(self, layers: nn.ModuleList) -> None:
        maps = guest_maps(self._plan.program, self._step(), moves=self.homes is not None)
        self._tables |= maps[(self._step() - 1) % len(maps)]
        self._give(layers)

    def end_step(self) -> None:
        """Chooses nothing."""


def train_with_guests(plan: Plan, steps: int, compiled: str = "") -> dict[str, Any]:
    """`train_as_rank` with `RandomGuests`, and the number of graphs that were compiled."""
    with mock.patch("moec.runtime.job.job.PlacementPolicy", RandomGuests):
        result = train_as_rank(plan, steps, compiled=compiled)
    return result | {"graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)}


def bytes_of_guests(plan: Plan, microbatches: int) -> tuple[int, int, bool]:
    """The bytes that this rank sends of guests in some steps, their gradients among them; the elements of all guests
    that it has; and whether ranks passed on parts of them."""
    sent, elements, passed_on, original = 0, 0, False, guest_routes.Routes._sent

    def counted(routes: Any, out: Any, into: Any, tensors: Any, content: Any) -> Any:
        nonlocal sent, passed_on
        of_expert = sum(tensor[0].numel() for tensor in tensors)
        sent += sum(guest_routes._size(letter, of_expert) for letter in out) * tensors[0].element_size()
        passed_on |= any(letter.expert.is_passed_on for letter in out)
        return original(routes, out, into, tensors, content)

    with (
        mock.patch("moec.runtime.job.job.PlacementPolicy", RandomGuests),
        mock.patch.object(guest_routes.Routes, "_sent", counted),
        moec.launch(plan, device="cpu") as job,
    ):
        tokens, model = torch.randint(32, (8 // job.data_size, 8)), job.build(seed=1)
        for _ in range(4):
            job.step(model, tokens, tokens, microbatches=microbatches)
            for layer in (layer for layer in model.layers if getattr(layer, "guests", None) is not None):
                registered = list(layer._weights.registered().values())
                experts = [local_part(registered[index]) for index in layer.of_experts]
                elements += len(layer.guests.routes.here) * sum(weight[0].numel() for weight in experts)
    return sent, elements, passed_on


def train_with_choices(plan: Plan, choices: str, steps: int) -> dict[str, Any]:
    """The losses of a run that writes its choices to a file, or repeats those of the file, and its last tables."""
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
        tables = {number: table.tolist() for number, table in model.placement_policy._tables.items()}
    return {"losses": losses, "tables": tables}


class SlowMoves(MoveGuard):
    """For which every step takes twice as long after a move."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(lambda: self.now)

    def stop(self) -> None:
        self.now += 2.0 if self.homes_before else 1.0
        super().stop()


def train_with_slow_moves(
    plan: Plan, steps: int, choices: str | None = None
) -> tuple[list[tuple[bool, int, float]], list[str]]:
    """For each step, whether experts have moved, the steps within which a move of layer 1 has to pay, and the loss;
    and all warnings."""
    found = []
    with (
        warnings.catch_warnings(record=True, action="always") as warned,
        mock.patch("moec.runtime.placement.policy.MoveGuard", SlowMoves),
        moec.launch(plan, device="cpu", choices=choices) as job,
    ):
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        with torch.no_grad():
            for layer in model.layers[1:]:
                layer.moe.gate.weight.to_local()[:2] *= 30  # two busy experts of the first rank
        for tokens, labels in batches_of(plan.spec, steps):
            loss = job.step(model, *own_part(job, tokens, labels)).item()
            optimizer.step()
            optimizer.zero_grad()
            policy = model.placement_policy
            found.append((policy.homes.have_moved, policy._chooser.horizons.get(1), loss))
    return found, [str(warning.message) for warning in warned]

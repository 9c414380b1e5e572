"""A training step on the virtual cluster: the actions of the plan's order, with what happens to weights and gradients
inside of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import torch
from torch import Tensor

from moec.passes.ir import Parameter, Program
from moec.passes.ir.schedule import Action, ActionKind
from moec.passes.place.schedule import (
    Event,
    Unit,
    events_inside,
    is_last_backward,
    is_sent,
    is_summed,
    order_of_step,
)
from moec.runtime.verify.cluster.passes import Passes
from moec.runtime.verify.cluster.recorded import FAILURES, BackwardError, PerRank
from moec.runtime.verify.cluster.virtual_weights import VirtualWeights, named_parameters


class VirtualStep:
    """One step of every rank. `gradients`: each trained parameter's gradient on every rank, in the master's layout."""

    def __init__(self, program: Program, weights: VirtualWeights, passes: Passes, microbatches: int) -> None:
        self.passes, self._weights = passes, weights
        self._order = order_of_step(program, microbatches)
        self.losses: list[PerRank] = []
        """The loss of each micro-batch on every rank."""
        self.gradients: dict[str, list[Tensor]] = {}
        self._new: dict[str, list[Tensor]] = {}
        """Gradients of a pass that are neither collected nor summed yet."""
        self._collected: dict[str, list[Tensor]] = {}
        self._coming: Iterator[Event] = iter(())
        self._entered: set[str] = set()

    def run(self, before: ActionKind | None = None) -> None:
        """Takes every action, or those before the first of the kind `before`.

        Raises `StepError` in a forward pass and `BackwardError` after it: for an op that fails, a weight that is used
        and was not gathered, a gradient that nobody sums.
        """
        try:
            for action in takewhile(lambda action: action.kind != before, self._order):
                self._take(action)
        finally:
            self._weights.drop_all()

    def _take(self, action: Action) -> None:
        events = events_inside(self._order, action, self._weights.units)
        match action.kind:
            case "agree":
                self.passes.agree()
            case "forward":
                assert action.microbatch is not None
                self._coming, self._entered = iter(events), set()
                self.passes.forward(action.microbatch)
            case "loss":
                self._loss(action)
            case "backward":
                if len(self.losses) == action.microbatch:  # a layer's host computes the loss
                    self._loss(action)
                self._differentiate(self.losses[-1])
                for event in events:
                    self._after_backward(event, last=is_last_backward(self._order, action))
            case "sum" if self._new or self._collected:
                name = next(iter(self._new | self._collected))
                raise BackwardError(f"the end of the step: the gradient of {name} is left over, which nobody summed")
            case "states":
                self.passes.update_states()

    def _loss(self, action: Action) -> None:
        assert action.microbatch is not None
        self.losses.append(self.passes.loss(action.microbatch))

    # ---- forward -----------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """A forward pass comes to a unit: gathers what the schedule gathers until then."""
        if unit.name in self._entered:
            return
        self._entered.add(unit.name)
        while unit.is_layer or not self._weights.has(unit):
            event = next(self._coming, None)
            if event is not None and event.kind == "gather":
                self._weights.gather(event.unit)
            else:
                return

    # ---- backward ----------------------------------------------------------------------------------

    def _differentiate(self, loss: PerRank) -> None:
        # A wrong plan's loss may depend on no parameter.
        live = [value for value in loss if value.requires_grad]
        try:
            torch.autograd.backward(live, [torch.ones_like(value) for value in live])
        except FAILURES as error:
            raise BackwardError(f"the backward pass, which stopped: {error}") from error

    def _after_backward(self, event: Event, *, last: bool) -> None:
        try:
            for name, parameter in named_parameters(event.unit):
                if not parameter.frozen:
                    self._move_gradient(event, name, parameter, last=last)
            if event.kind == "backward":
                self._weights.drop_used(event.unit)
        except FAILURES as error:
            raise BackwardError(f"the gradients' way to the optimizer, which stopped: {error}") from error

    def _move_gradient(self, event: Event, name: str, parameter: Parameter, *, last: bool) -> None:
        summed = is_summed(parameter, last)
        if event.kind == "backward":
            self._new[name] = self._weights.gradient_of_pass(name)
        moves = {
            "backward": summed and not is_sent(parameter),
            "collect": not summed,
            "sum": summed and is_sent(parameter),
        }
        if not moves.get(event.kind):
            return
        if name not in self._new:
            raise BackwardError(f"`{event}` before the backward pass gave the gradient of {name}")
        gradient = _added(self._collected.pop(name, None), self._new.pop(name))
        if event.kind == "collect":
            self._collected[name] = gradient
        else:
            self.gradients[name] = _added(self.gradients.get(name), self._weights.summed(name, gradient))


def _added(one: list[Tensor] | None, other: list[Tensor]) -> list[Tensor]:
    return other if one is None else [a + b for a, b in zip(one, other, strict=True)]

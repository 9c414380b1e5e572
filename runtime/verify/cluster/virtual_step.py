"""A training step on the virtual cluster: the actions of the plan's order, with the events of weights and gradients
inside of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile

import torch
from torch import Tensor

from moec.passes.ir import Parameter, Program
from moec.passes.ir.order import Action, ActionKind, Order
from moec.passes.place.schedule import (
    Event,
    Unit,
    events_inside,
    is_last_backward,
    is_sent,
    is_summed,
    order_of_step,
)
from moec.runtime.verify.cluster.recorded import FAILURES, BackwardError, PerRank
from moec.runtime.verify.cluster.stage_values import StageValues
from moec.runtime.verify.cluster.virtual_weights import VirtualWeights, named_parameters


class VirtualStep:
    """One step of every rank. `gradients`: each trained parameter's gradient on every rank, in the master's layout."""

    def __init__(self, program: Program, weights: VirtualWeights, stage_values: StageValues, microbatches: int) -> None:
        self.stage_values, self._weights = stage_values, weights
        self._orders = [order_of_step(program, microbatches, stage) for stage in range(len(weights.units))]
        self.losses: list[PerRank] = []
        """The loss of each micro-batch on every rank."""
        self.gradients: dict[str, list[Tensor]] = {}
        self._new: dict[str, list[Tensor]] = {}
        """Gradients of a backward pass that are neither collected nor summed yet."""
        self._collected: dict[str, list[Tensor]] = {}
        self._events: Iterator[Event] = iter(())
        self._entered: set[str] = set()

    def run(self, before: ActionKind | None = None) -> None:
        """Runs every action, or those before the first of the kind `before`.

        Raises `StepError` in a forward pass and `BackwardError` after it: for an op that fails, a weight that is used
        and was not gathered, a gradient that is not summed, stages that wait for each other.
        """
        queues = [deque(takewhile(lambda action: action.kind != before, order)) for order in self._orders]
        try:
            while any(queues):
                if not any(map(self._advance, self._orders, queues)):
                    waiting = ", ".join(f"stage {i} for `{actions[0]}`" for i, actions in enumerate(queues) if actions)
                    raise BackwardError(f"the stages, which wait for each other: {waiting}")
        finally:
            self._weights.drop_all()

    def _advance(self, order: Order, actions: deque[Action]) -> bool:
        """Runs the actions of a stage until it waits for another one; returns whether it ran any."""
        moved = False
        while actions and self._is_ready(order.stage, actions[0]):
            self._run_action(order, actions.popleft())
            moved = True
        return moved

    def _is_ready(self, stage: int, action: Action) -> bool:
        if action.kind == "receive":
            return (stage - 1, action.microbatch) in self.stage_values.sent
        return action.kind != "receive_gradients" or (stage, action.microbatch) in self.stage_values.sent_back

    def _run_action(self, order: Order, action: Action) -> None:
        stage, stage_values = order.stage, self.stage_values
        if action.microbatch is not None:
            self._run_in_microbatch(order, action, action.microbatch)
        elif action.kind == "agree":
            stage_values.agree()
        elif action.kind == "states":
            stage_values.update_states(stage)
        elif action.kind == "sum":
            names = {name for unit in self._weights.units[stage] for name, _ in named_parameters(unit)}
            for name in sorted(names & {*self._new, *self._collected}):
                raise BackwardError(f"the end of the step: the gradient of {name} is left over, which nobody summed")

    def _run_in_microbatch(self, order: Order, action: Action, microbatch: int) -> None:
        stage, stage_values = order.stage, self.stage_values
        events = events_inside(order, action, self._weights.units[stage])
        match action.kind:
            case "receive":
                stage_values.receive(stage, microbatch)
            case "forward":
                self._events, self._entered = iter(events), set()
                stage_values.forward(stage, microbatch)
            case "send":
                stage_values.send(stage, microbatch)
            case "loss":
                self.losses.append(stage_values.loss(microbatch))
            case "receive_gradients":
                stage_values.receive_gradients(stage, microbatch)
            case "backward":
                self._differentiate(stage, microbatch)
                for event in events:
                    self._after_backward(event, last=is_last_backward(order, action))
            case "send_gradients":
                stage_values.send_gradients(stage, microbatch)

    # ---- forward -----------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """Takes events up to this layer's own `forward`. Units that are no layer have no event: for them, takes gathers
        until their weights are there."""
        if unit.name in self._entered:
            return
        self._entered.add(unit.name)
        while unit.is_layer or not self._weights.has(unit):
            event = next(self._events, None)
            if event is not None and event.kind == "gather":
                self._weights.gather(event.unit)
            else:
                return

    # ---- backward ----------------------------------------------------------------------------------

    def _differentiate(self, stage: int, microbatch: int) -> None:
        if stage < len(self._orders) - 1:
            outputs, gradients = self.stage_values.differentiated(stage, microbatch)
        else:
            if len(self.losses) == microbatch:  # a layer's host computes the loss
                self.losses.append(self.stage_values.loss(microbatch))
            # A wrong plan's loss may depend on no parameter.
            outputs = [value for value in self.losses[microbatch] if value.requires_grad]
            gradients = [torch.ones_like(value) for value in outputs]
        try:
            torch.autograd.backward(outputs, gradients)
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
            "reduce": summed and is_sent(parameter),
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


def _added(total: list[Tensor] | None, gradients: list[Tensor]) -> list[Tensor]:
    return gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]

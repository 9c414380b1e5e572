"""A training step on the virtual cluster: the actions of the plan's order, with the events of weights and gradients
inside of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import torch
from torch import Tensor

from moec.passes.ir import Parameter, Program
from moec.passes.ir.order import Action, ActionKind, Order
from moec.passes.ir.order_messages import merged, waiting
from moec.passes.place.pipeline_orders import orders_in_turn
from moec.passes.place.schedule import (
    Event,
    Unit,
    events_inside,
    is_last_backward,
    is_sent,
    is_summed,
)
from moec.runtime.model.stage_messages import StageBatch
from moec.runtime.verify.cluster.recorded import FAILURES, BackwardError, PerRank
from moec.runtime.verify.cluster.stage_values import StageValues
from moec.runtime.verify.cluster.virtual_weights import VirtualWeights, named_parameters


class VirtualStep:
    """One step of every rank. `gradients`: each trained parameter's gradient on every rank, in the master's layout."""

    def __init__(self, program: Program, weights: VirtualWeights, stage_values: StageValues, microbatches: int) -> None:
        self.stage_values, self._weights = stage_values, weights
        own = program.orders if microbatches == program.microbatches else ()
        self._orders = own or orders_in_turn(program, microbatches)
        self._last_stage = len(weights.units) - 1
        self.losses: dict[int, PerRank] = {}
        """The loss of each micro-batch on every rank."""
        self.gradients: dict[str, list[Tensor]] = {}
        self._new: dict[tuple[int, str], list[Tensor]] = {}
        """Gradients of a stage's backward pass that are neither collected nor summed yet."""
        self._collected: dict[tuple[int, str], list[Tensor]] = {}
        self._started: dict[StageBatch, tuple[list[Tensor], list[Tensor]]] = {}
        """The outputs, with their gradients, from which a backward pass starts whose gradients of weights wait."""
        self._events: Iterator[Event] = iter(())
        self._entered: set[str] = set()

    def run(self, before: ActionKind | None = None) -> None:
        """Runs every action, or those before the first of the kind `before`.

        Raises `StepError` in a forward pass and `BackwardError` after it: for an op that fails, a weight that is used
        and was not gathered, a gradient that is not summed, stages that wait for each other.
        """
        actions = [[*takewhile(lambda action: action.kind != before, order)] for order in self._orders]
        orders = [Order(order.stages, tuple(own)) for order, own in zip(self._orders, actions, strict=True)]
        try:
            for number, action in merged(orders):
                self._run_action(self._orders[number], action)
            if stuck := ", ".join(f"`{action}`" for action in waiting(orders)):
                raise BackwardError(f"the stages, which wait for each other at {stuck}")
        finally:
            self._weights.drop_all()

    def _run_action(self, order: Order, action: Action) -> None:
        if action.microbatch is not None:
            stage = self._last_stage if action.stage is None else action.stage
            self._run_in_microbatch(order, action, stage, action.microbatch)
        elif action.kind == "agree":
            self.stage_values.agree()
        elif action.kind == "states":
            for stage in order.stages:
                self.stage_values.update_states(stage)
        elif action.kind == "sum":
            self._require_summed(order)

    def _require_summed(self, order: Order) -> None:
        for _, name in sorted(key for key in {*self._new, *self._collected} if key[0] in order.stages):
            raise BackwardError(f"the end of the step: the gradient of {name} is left over, which nobody summed")

    def _run_in_microbatch(self, order: Order, action: Action, stage: int, microbatch: int) -> None:
        stage_values = self.stage_values
        self._weights.stage, self._weights.microbatch = stage, microbatch
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
                self.losses[microbatch] = stage_values.loss(microbatch)
            case "receive_gradients":
                stage_values.receive_gradients(stage, microbatch)
            case "backward" | "inputs" | "weights":
                self._differentiate(action.kind, stage, microbatch)
                for event in events:
                    self._after_backward(action, event, last=is_last_backward(order, action))
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

    def _differentiate(self, kind: ActionKind, stage: int, microbatch: int) -> None:
        """The backward pass of a stage: all of it, or its part `inputs` and later its part `weights`."""
        place = stage, microbatch
        if kind != "weights":
            self._started[place] = self._start_of_backward(stage, microbatch)
        outputs, gradients = self._started[place] if kind == "inputs" else self._started.pop(place)
        received = self.stage_values.received_leaves(stage, microbatch)
        try:
            if kind != "inputs":
                torch.autograd.backward(outputs, gradients)
            elif received:
                torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=received)
        except FAILURES as error:
            raise BackwardError(f"the backward pass, which stopped: {error}") from error

    def _start_of_backward(self, stage: int, microbatch: int) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs from which a backward pass starts, and their gradients."""
        if stage < self._last_stage:
            return self.stage_values.differentiated(stage, microbatch)
        if microbatch not in self.losses:  # a layer's host computes the loss
            self.losses[microbatch] = self.stage_values.loss(microbatch)
        # A wrong plan's loss may depend on no parameter.
        outputs = [value for value in self.losses[microbatch] if value.requires_grad]
        return outputs, [torch.ones_like(value) for value in outputs]

    def _after_backward(self, action: Action, event: Event, *, last: bool) -> None:
        if action.kind == "inputs":
            return
        completes = event.kind == action.kind
        try:
            for name, parameter in named_parameters(event.unit):
                if not parameter.frozen:
                    self._move_gradient(event, name, parameter, last=last, completes=completes)
            if completes:
                self._weights.drop_used(event.unit)
        except FAILURES as error:
            raise BackwardError(f"the gradients' way to the optimizer, which stopped: {error}") from error

    def _move_gradient(self, event: Event, name: str, parameter: Parameter, *, last: bool, completes: bool) -> None:
        summed, key = is_summed(parameter, last), (self._weights.stage, name)
        if completes:
            self._new[key] = self._weights.gradient_of_pass(name)
        moves = {"collect": not summed, "reduce": summed and is_sent(parameter)}
        if not moves.get(event.kind, completes and summed and not is_sent(parameter)):
            return
        if key not in self._new:
            raise BackwardError(f"`{event}` before the backward pass gave the gradient of {name}")
        gradient = _added(self._collected.pop(key, None), self._new.pop(key))
        if event.kind == "collect":
            self._collected[key] = gradient
        else:
            self.gradients[name] = _added(self.gradients.get(name), self._weights.summed(name, gradient))


def _added(total: list[Tensor] | None, gradients: list[Tensor]) -> list[Tensor]:
    return gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]

"""`moec verify` runs what a schedule says of weights and gradients: where that is wrong, a plan is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.plans import moe_plan
from support.verified import require_equal
from torch import Tensor

from moec.passes.ir.order import Round
from moec.passes.place.schedule import Event
from moec.runtime.errors import JobError
from moec.runtime.verify.cluster import virtual_step
from moec.runtime.verify.cluster.virtual_weights import VirtualWeights
from moec.runtime.verify.verification import verify

Events = list[Event]


def without(kind: str, unit: str = "layers.1") -> Callable[[Events], Events]:
    return lambda events: [event for event in events if str(event) != f"{kind} {unit}"]


def reduce_first(events: Events) -> Events:
    return sorted(events, key=lambda event: str(event) != "reduce layers.1")


FAULTS = {
    "a gather is left out": ({"zero": 3}, without("gather"), "was not gathered"),
    "a gather of the first micro-batch is left out": (
        {"zero": 1, "microbatches": 2},
        without("gather"),
        "not gathered",
    ),
    "a gather of the embedding is left out": ({"zero": 3}, without("gather", "embedding.weight"), "not gathered"),
    "a sum is left out": ({"zero": 2}, without("reduce"), "is left over, which nobody summed"),
    "a sum comes too early": ({}, reduce_first, "`reduce layers.1` before the backward pass gave the gradient"),
    "a micro-batch is not collected": ({"microbatches": 2}, without("collect"), "layers.1."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_schedule_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str):
    options, change, words = FAULTS[fault]
    plan = moe_plan(ranks=4, ep=2, batch=16, **options)
    require_equal(plan, float32=False)
    events = virtual_step.events_inside
    monkeypatch.setattr(virtual_step, "events_inside", lambda *arguments: change(events(*arguments)))
    report = verify(plan, float32=False)
    assert not report.ok
    assert words in report.worst


def test_gradients_that_no_rule_sends_are_found(monkeypatch: pytest.MonkeyPatch):
    """The sums' own numbers show it, not their order: each rank keeps its terms."""
    plan = moe_plan(ranks=4, ep=2, batch=16)
    summed = VirtualWeights.summed

    def alone(self: VirtualWeights, name: str, of_leaves: Sequence[Tensor]) -> list[Tensor]:
        whole = summed(self, name, of_leaves)
        return [part / len(whole) for part in whole] if name == "layers.1.moe.gate.weight" else whole

    monkeypatch.setattr(VirtualWeights, "summed", alone)
    report = verify(plan, float32=False)
    assert not report.ok
    assert "layers.1.moe.gate.weight" in report.worst


def test_an_order_that_no_plan_folder_gave_is_refused():
    plan = moe_plan(ranks=4, ep=2, batch=16, microbatches=4)
    (order,) = plan.program.orders
    agree, passes, *end = order.parts
    assert isinstance(passes, Round)
    forwards = replace(passes, actions=tuple(action for action in passes.actions if action.kind != "backward"))
    wrong = replace(plan.program, orders=(replace(order, parts=(agree, forwards, *end)),))
    with pytest.raises(JobError, match="order of stage 0: a round has the actions of a whole micro-batch, in order\n"):
        verify(replace(plan, program=wrong))

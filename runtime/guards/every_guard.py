"""The list of guards, and how the events of a step call them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moec.runtime.guards import equal_batches, first_batch, mean_losses, padded_labels, rank_means, tp_losses
from moec.runtime.guards.guard import BatchAgreed, Guard, LogitsGiven, LossComputed, StepBegins, StepEnds
from moec.runtime.guards.leftover_gradients import AFTER_ERROR, LEFTOVER
from moec.runtime.guards.untrained import EVALUATION, NO_GRADIENT, NO_LABEL
from moec.runtime.ranks.checks import Complaint

GUARDS: tuple[Guard[Any], ...] = (
    AFTER_ERROR, equal_batches.GUARD, EVALUATION, LEFTOVER, first_batch.GUARD, padded_labels.GUARD, NO_LABEL,
    tp_losses.GUARD, mean_losses.GUARD, NO_GRADIENT, rank_means.GUARD,
)  # fmt: skip
"""In the order in which they look."""

Event = StepBegins | BatchAgreed | LossComputed | LogitsGiven | StepEnds


def first_complaint(event: Event) -> Complaint | None:
    """The first complaint of the guards that look at this event; every one of them looks, and may warn."""
    first = None
    for guard in tuple(_looking_at(event)):
        if guard.once:
            event.seen.add(guard.once)
        complaint = guard.look(event)
        assert complaint is None or complaint.code == guard.code
        first = first or complaint
    return first


def look_at(event: Event) -> None:
    """Raises `JobError` for a guard's complaint, which is the same on every rank."""
    if (complaint := first_complaint(event)) is not None:
        raise complaint.error()


def with_number(event: BatchAgreed) -> BatchAgreed:
    """The event with the number that its guards add to the ranks' agreement."""
    numbers = (guard.number(event) for guard in _looking_at(event) if guard.number is not None)
    return replace(event, number=next(numbers, 0))


def _looking_at(event: Event) -> Iterator[Guard[Any]]:
    for guard in GUARDS:
        if guard.event is type(event) and guard.when(event) and not (guard.once and guard.once in event.seen):
            yield guard

"""The list of guards, and how the events of a step call them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moec.runtime.guards import (
    equal_batches,
    first_batch,
    layer_hosts,
    mean_losses,
    padded_labels,
    rank_means,
    shared_losses,
)
from moec.runtime.guards.finite_steps import GRADIENT, GRADIENTS, LOSS, NORM
from moec.runtime.guards.finite_values import ROUTERS, STATES, TOKENS
from moec.runtime.guards.guard import BatchAgreed, Event, Guard
from moec.runtime.guards.layer_weights import NARROWED, UNTOLD
from moec.runtime.guards.leftover_gradients import AFTER_ERROR, LEFTOVER
from moec.runtime.guards.recomputations import ACCUMULATED, DRAWS, REENTRANT
from moec.runtime.guards.untrained import EVALUATION, NO_GRADIENT, NO_LABEL
from moec.runtime.guards.wrappers import ANOMALY, ASKING, AUTOCAST, WRAPPED
from moec.runtime.ranks.checks import Checks, Complaint

GUARDS: tuple[Guard[Any], ...] = (
    ASKING, AUTOCAST, ANOMALY, WRAPPED, DRAWS, ACCUMULATED, REENTRANT, layer_hosts.GUARD, UNTOLD, NARROWED, STATES,
    AFTER_ERROR, equal_batches.GUARD, EVALUATION, LEFTOVER, first_batch.GUARD, padded_labels.GUARD, NO_LABEL,
    ROUTERS, TOKENS, rank_means.GUARD, shared_losses.GUARD, mean_losses.GUARD, NO_GRADIENT, LOSS, GRADIENT, NORM,
    GRADIENTS,
)  # fmt: skip
"""In the order in which they look."""


def look_at(event: Event, checks: Checks | None = None) -> None:
    """Raises `JobError` for a guard's complaint. Where an `agreed` guard looks, it is a collective by `checks`."""
    complaints = _complaints(event)
    if any(guard.agreed for guard, _ in complaints):
        assert checks is not None
        checks.require(event.site, next((c for guard, c in complaints if guard.agreed and c is not None), None))
    for _, complaint in complaints:
        if complaint is not None:
            raise complaint.error()


def first_complaint(event: Event) -> Complaint | None:
    """The first complaint of the guards that look at this event, for an agreement of the ranks."""
    return next((complaint for _, complaint in _complaints(event) if complaint is not None), None)


def with_number(event: BatchAgreed) -> BatchAgreed:
    """The event with the number that its guards add to the ranks' agreement."""
    numbers = (guard.number(event) for guard in _looking_at(event) if guard.number is not None)
    return replace(event, number=next(numbers, 0))


def _complaints(event: Event) -> list[tuple[Guard[Any], Complaint | None]]:
    """Each guard that looks at the event, with its complaint. All of them look, and may warn."""
    complaints = []
    for guard in tuple(_looking_at(event)):
        if guard.once:
            event.seen.add(guard.once)
        complaint = guard.look(event)
        assert complaint is None or complaint.code == guard.code
        complaints.append((guard, complaint))
    return complaints


def _looking_at(event: Event) -> Iterator[Guard[Any]]:
    for guard in GUARDS:
        may_look = isinstance(event, guard.event) and (event.reads_values or not guard.waits)
        if may_look and not (guard.once and guard.once in event.seen) and guard.when(event):
            yield guard

"""Messages between the orders of pipeline ranks: which send belongs to which receive, and which ranks wait for each
other for ever."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from moec.passes.ir.order import Action, ActionKind, Order


class Message(NamedTuple):
    """What the stage `sender` sends for a micro-batch: its values to the next stage, or gradients to the one before."""

    sender: int
    receiver: int
    microbatch: int | None


_TO: Mapping[ActionKind, int] = {"send": 1, "send_gradients": -1}
_FROM: Mapping[ActionKind, int] = {"receive": -1, "receive_gradients": 1}


def message_of(action: Action) -> Message | None:
    """The message that an action sends or receives."""
    stage, kind = action.stage, action.kind
    if stage is None:
        return None
    if kind in _TO:
        return Message(stage, stage + _TO[kind], action.microbatch)
    return Message(stage + _FROM[kind], stage, action.microbatch) if kind in _FROM else None


def sent_by(action: Action) -> Message | None:
    """The message that an action sends."""
    return message_of(action) if action.kind in _TO else None


def merged(orders: Sequence[Order]) -> Iterator[tuple[int, Action]]:
    """The actions of all ranks, each with the number of its order, so that each comes after what it waits for.

    Sender and receiver take a message at the same time, the sender first. Orders that end this way end over any
    transport that keeps the order of messages between two ranks. Stops early where ranks wait for each other for ever
    (`waiting`).
    """
    queues = [deque(order) for order in orders]
    rank_of = {stage: rank for rank, order in enumerate(orders) for stage in order.stages}
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and (takers := _takers(rank, queues, rank_of)):
                yield from ((taker, queues[taker].popleft()) for taker in takers)
                moved = True


def _takers(rank: int, queues: Sequence[deque[Action]], rank_of: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks that take the next action of `rank`: of a message its sender and receiver. Empty if it must wait."""
    message = message_of(queues[rank][0])
    if message is None:
        return (rank,)
    sender, receiver = rank_of.get(message.sender), rank_of.get(message.receiver)
    if sender is None or receiver is None:
        return ()  # the text of a plan without the order of that stage
    sent = next(iter(queues[sender]), None)
    # A rank that sends to itself has both sides one after the other.
    received = next(islice(queues[receiver], int(sender == receiver), None), None)
    is_met = sent is not None and received is not None and sent_by(sent) == message_of(received) == message
    return (sender, receiver) if is_met else ()


def waiting(orders: Sequence[Order]) -> list[Action]:
    """The actions at which ranks wait for each other for ever; none if all orders can be run to their ends."""
    if len(orders) < 2:  # one order sends nothing, and may have very many micro-batches
        return []
    taken = Counter(rank for rank, _ in merged(orders))
    return [action for rank, order in enumerate(orders) for action in islice(order, taken[rank], taken[rank] + 1)]

"""What the orders of several pipeline ranks send each other: each message is received, and nobody waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moec.passes.ir.order import Action, ActionKind, Order


class Message(NamedTuple):
    """Values of a micro-batch that `sender` hands to the stage before or after it, or their gradients."""

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


def waiting(orders: Sequence[Order]) -> list[Action]:
    """The actions at which ranks wait for each other for ever, if both sides of a message take it at once.

    Empty if all orders can be run to their ends so, and therefore by any transport that keeps each pair's order.
    """
    if len(orders) < 2:
        return []
    queues = {order.stages: deque(order) for order in orders}
    queue_of = {stage: queue for stages, queue in queues.items() for stage in stages}
    moved = True
    while moved:
        moved = False
        for queue in queues.values():
            while queue and _advance(queue, queue_of):
                moved = True
    return [queue[0] for queue in queues.values() if queue]


def _advance(queue: deque[Action], queue_of: Mapping[int, deque[Action]]) -> bool:
    """Takes the next action of a queue, with the other side of its message; returns whether it could."""
    message = message_of(queue[0])
    if message is None:
        queue.popleft()
        return True
    sender, receiver = queue_of.get(message.sender), queue_of.get(message.receiver)
    if not sender or not receiver:
        return False
    if sender is receiver and len(queue) < 2:
        return False
    sent, received = sender[0], receiver[1 if sender is receiver else 0]
    is_taken = sent.kind in _TO and received.kind in _FROM and message_of(sent) == message_of(received) == message
    if is_taken:
        sender.popleft()
        receiver.popleft()
    return is_taken

"""Placements of experts: what peers do on a routing trace, and moec's guests.

Each policy gives the placement of a layer in one iteration after the other, and knows the loads of the sample before;
FasterMoE's knows those of the step itself, as it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from adaptivity.replay import (
    GUEST,
    HORIZON,
    MOVE,
    PARAMETERS,
    SUMMED,
    Moment,
    Network,
    Placed,
    evenly,
    figures,
    fresh,
    seconds,
)
from moec.passes.guests.choice import Room, choose_guests, traffic_of
from moec.passes.guests.homes import WhenToMove, choose_homes, sent_by_busiest
from moec.passes.loads.placements import contiguous, greedy, replicated

SHADOWS = 4
"""The most experts that FasterMoE's policy has on every rank."""


def static(moments: Sequence[Moment], network: Network, ep: int, slots: int) -> Iterator[Placed]:
    """Experts in order."""
    experts = len(moments[0].homes)
    copies = _copies(contiguous(1, experts, ep)[0], ep)
    return (Placed(copies, evenly) for _ in moments)


def smartmoe(moments: Sequence[Moment], network: Network, ep: int, slots: int) -> Iterator[Placed]:
    """The largest expert first, each on the emptiest rank (Zhai et al. 2023, algorithm 1), moved where that pays."""
    now = _copies(moments[0].homes, ep)
    for moment in moments:
        new = _copies(greedy(moment.before.sum(0)[None], ep)[0], ep)
        moved = _worth_moving(now, new, moment, network)
        now = new if moved else now
        yield Placed(now, evenly, moved=moved)


def eplb(moments: Sequence[Moment], network: Network, ep: int, slots: int, nodes: int = 1) -> Iterator[Placed]:
    """Replicas with states of their own, rows split evenly, moved where that pays; those of an expert within one of
    `nodes` (DeepSeek-AI 2025)."""
    now: Any = None
    for moment in moments:
        new = _replicas(moment.before.sum(0), ep, slots, nodes)
        if now is None:
            now, moved = new, 0.0
        else:
            new = _renamed(now, new)
            moved = _worth_moving(now, new, moment, network)
            now = new if moved else now
        number = now.sum(1)
        summed = np.where(number > 1, 2 * (number - 1) / number * SUMMED, 0.0)
        yield Placed(now, evenly, float((now * summed[:, None]).sum(0).max()), moved)


def fastermoe(moments: Sequence[Moment], network: Network, ep: int, slots: int) -> Iterator[Placed]:
    """The busiest experts of the step on every rank, where each computes its own rows (He et al. 2022, section 4.2)."""
    for moment in moments:
        order = np.argsort(-moment.now.sum((0, 1)), kind="stable")
        options = list[Placed]()
        for number in range(SHADOWS + 1):
            copies = _copies(moment.homes, ep)
            copies[order[:number]] = True
            options.append(Placed(copies, evenly, GUEST * number))
        yield min(options, key=lambda placed: seconds(placed, figures(placed, moment.now), network))


def guests(moments: Sequence[Moment], network: Network, ep: int, slots: int) -> Iterator[Placed]:
    """moec's: weights only, for a step; rows split by the step's own counts."""
    room = Room(slots // ep, slots)
    for moment in moments:
        chosen = choose_guests(moment.before, moment.homes, room, network.time)
        yield Placed(chosen.copies, fresh, GUEST * traffic_of(chosen.copies, moment.homes))


def homes(
    moments: Sequence[Moment], network: Network, ep: int, slots: int, *, with_guests: bool = False
) -> Iterator[Placed]:
    """moec's homes that move, alone or with guests."""
    room, now = Room(slots // ep, slots) if with_guests else Room(0, 0), moments[0].homes
    for moment in moments:
        before, now = now, choose_homes(moment.before, now, room, network.time, WhenToMove(1.1, HORIZON)).homes
        chosen = choose_guests(moment.before, now, room, network.time)
        yield Placed(
            chosen.copies,
            fresh,
            GUEST * traffic_of(chosen.copies, now),
            sent_by_busiest(before, now, ep),
        )


def _copies(homes: Any, ranks: int) -> Any:
    return homes[:, None] == np.arange(ranks)


def _replicas(loads: Any, ranks: int, slots: int, nodes: int) -> Any:
    if nodes == 1:
        return replicated(loads[None], ranks, slots)[0]
    node_of, copies = greedy(loads[None], nodes)[0], np.zeros((len(loads), ranks), bool)
    for node in range(nodes):
        experts, of_node = np.flatnonzero(node_of == node), slice(node * ranks // nodes, (node + 1) * ranks // nodes)
        copies[experts, of_node] = replicated(loads[experts][None], ranks // nodes, slots // nodes)[0]
    return copies


def _renamed(now: Any, new: Any) -> Any:
    """The same placement with its ranks in the order in which most copies stay."""
    same = now.astype(int).T @ new.astype(int)
    left, taken, found = set(range(len(same))), set[int](), np.zeros_like(new)
    for flat in np.argsort(-same, axis=None, kind="stable").tolist():
        rank, of_new = divmod(flat, len(same))
        if rank in left and of_new not in taken:
            found[:, rank] = new[:, of_new]
            left.discard(rank)
            taken.add(of_new)
    return found


def _worth_moving(now: Any, new: Any, moment: Moment, network: Network) -> float:
    """The experts that the rank with most of them would get, if their rows save more than that costs until the next
    decision; else 0."""
    moved = float((new & ~now).sum(0).max())
    counts = moment.before.sum(0)
    gain = (evenly(counts, now).sum(0).max() - evenly(counts, new).sum(0).max()) * network.time.row * HORIZON
    return moved if gain > moved * MOVE * PARAMETERS / network.bandwidth else 0.0

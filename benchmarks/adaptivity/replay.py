"""A routing trace again, layer by layer: what placements of experts, decided on earlier loads, would have taken.

A layer takes the products of the busiest rank, the rows over the busiest wire, what of weights and gradients on their
way no products hide, and what moves cost, spread over the steps until the next. Groups of `ep` ranks have their own
tokens, and a layer waits for the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moec.passes.guests.choice import LayerTime
from moec.passes.guests.split import split
from moec.passes.loads.placements import greedy

DIM, HIDDEN, PRODUCTS = 1536, 6144, 400e12
"""The model of the trace (SmartMoE, Zhai et al. 2023), and FLOPs per second of a device."""

PARAMETERS = 2 * DIM * HIDDEN
CROSSINGS = 4
"""How often a row is sent over both passes, in bf16."""

GUEST, MOVE, SUMMED = 6, 14, 4
"""Bytes of a parameter: of a guest, a weight in bf16 and its fp32 gradient; of an expert that moves with master and two
states; and of a gradient in fp32, which replicas with states of their own sum."""

HORIZON = 50
"""Steps between two samples of the trace, and so between a decision and the loads that it knows."""


class Network(NamedTuple):
    """What a cell of a table is for: bytes per second of a device, the share of products beside which weights travel,
    and how many times the trace's rows a step has."""

    name: str
    bandwidth: float
    hidden: float
    times: int

    @property
    def time(self) -> LayerTime:
        """Of a row of the trace."""
        row, sent = 6 * PARAMETERS / PRODUCTS, CROSSINGS * 2 * DIM / self.bandwidth
        guest, move = (bytes_of * PARAMETERS / self.bandwidth for bytes_of in (GUEST, MOVE))
        return LayerTime(row * self.times, sent * self.times, guest, self.hidden, move)


NETWORKS = [
    Network("rows alone", math.inf, 0.0, 1),
    *(
        Network(f"{name}, {what}", bandwidth, hidden, times)
        for name, bandwidth in (("400 Gb/s", 50e9), ("50 Gb/s", 6.25e9))
        for what, hidden, times in (("nothing hidden", 0.0, 1), ("80 % hide", 0.8, 1), ("8 times the rows", 0.0, 8))
    ),
]


class Placed(NamedTuple):
    """A placement in a step: who has which expert [experts, ranks], how rows are split, bytes of a parameter that the
    busiest rank sends or gets, and the experts that moved to the rank that got most."""

    copies: Any
    split: Callable[[Any, Any], Any]
    traffic: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class Moment:
    """A layer in an iteration: rows [groups, ranks, experts] now, and of one group on average at the sample before."""

    now: Any
    before: Any
    homes: Any
    """The rank of each expert, by greedy on the first half of the trace."""


def moments(trace: Any, ep: int) -> Iterator[list[Moment]]:
    """The moments of the second half of a trace [iterations, layers, ranks, experts], a list for each layer."""
    iterations, layers, ranks, experts = trace.shape
    grouped, first = trace.reshape(iterations, layers, ranks // ep, ep, experts), iterations // 2
    for layer in range(layers):
        of_layer = grouped[:, layer]
        homes = greedy(of_layer[:first].sum((1, 2)).mean(0)[None], ep)[0]
        before = of_layer.mean(1).astype(np.int64)
        yield [Moment(of_layer[number], before[number - 1], homes) for number in range(first, iterations)]


def evenly(counts: Any, copies: Any) -> Any:
    """Each copy has the same share of its expert's rows."""
    return copies * (counts / copies.sum(1))[:, None]


class Figures(NamedTuple):
    """Rows of the busiest rank, and over the busiest wire, of the slowest group."""

    rows: float
    sent: float


def figures(placed: Placed, now: Any) -> Figures:
    """Those of a step; a rank's own copies take its own rows first."""
    found = list[Figures]()
    for counts in now:
        quotas = placed.split(counts.sum(0), placed.copies)
        local, rows = np.minimum(counts.T, quotas).sum(0), quotas.sum(0)
        found.append(Figures(rows.max(), max((rows - local).max(), (counts.sum(1) - local).max())))
    return Figures(*map(max, zip(*found, strict=True)))


def seconds(placed: Placed, of: Figures, network: Network) -> float:
    """Seconds of a layer, with the share of moves."""
    moves = placed.moved * MOVE * PARAMETERS / network.bandwidth / HORIZON
    return network.time.seconds(*of, placed.traffic / GUEST) + moves


def even_seconds(network: Network, rows: float, ep: int) -> float:
    """Seconds of a layer with equal loads, `rows` of each rank."""
    return network.time.seconds(rows, rows * (ep - 1) / ep, 0.0)


fresh = split
"""By the step's own counts."""

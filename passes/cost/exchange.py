"""The seconds of an all-to-all: linear or hierarchical, and with rows that cross a network once for each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moec.passes.ir.work.arrays import larger, rounded, smaller
from moec.passes.ir.work.cost import Choices


@dataclass(frozen=True, slots=True)
class Exchange:
    """How ranks exchange rows of tokens.

    `linear`: each rank sends to every other one, and all levels carry their messages at once. `hierarchical` (2DH of
    Tutel, arXiv 2206.03382, section 3.4): one exchange for each level, the innermost first; a rank sends only to its
    peers in other units, in fewer and larger messages. `once_per_node`: a token crosses a network once for
    all of its experts in a unit of the innermost level, which copies it there. moec's jobs run the default.
    """

    algorithm: Literal["linear", "hierarchical"] = "linear"
    once_per_node: bool = False


class Link(NamedTuple):
    """A level as a group lies on it: its `units` of the level below with `inside` ranks each, the bytes per second of
    one rank, the seconds of a message to one peer."""

    inside: int
    units: int
    bandwidth: float
    latency: float


def exchange_seconds(
    exchange: Exchange, whole: float, ranks: int, links: Sequence[Link], choices: Choices | None, copying: float
) -> float:
    """Seconds of an exchange of `whole` bytes of a rank, its own part included, over links from the innermost.

    `copying`: seconds of the copies that sort the bytes of a hierarchical exchange for its next level.
    """
    seconds, crossed = 0.0, 0
    for number, link in enumerate(links):
        is_crossed = link.units > 1
        crossed = crossed + is_crossed * (number > 0)
        over = whole * _share(exchange, number, link, ranks, choices) / link.bandwidth
        peers = (link.units - 1) * (1 if exchange.algorithm == "hierarchical" else link.inside)
        one = (over + peers * link.latency * (whole > 0)) * is_crossed
        seconds = seconds + one if exchange.algorithm == "hierarchical" else larger(seconds, one)
    return seconds + copying * crossed * (exchange.algorithm == "hierarchical")


def _share(exchange: Exchange, number: int, link: Link, ranks: int, choices: Choices | None) -> float:
    """The share of a rank's bytes that crosses a level."""
    if number == 0:
        # Rows of other nodes reach their rank from the one that the network brought them to.
        forwards = exchange.algorithm == "hierarchical" or exchange.once_per_node
        return (link.units - 1) / (link.units if forwards else ranks)
    if exchange.once_per_node and choices is not None:
        nodes = -(-ranks // link.inside)
        return remote_nodes(choices, nodes) / choices.number * (link.units - 1) / larger(1, nodes - 1)
    if exchange.algorithm == "hierarchical":
        return (link.units - 1) / link.units
    return link.inside * (link.units - 1) / ranks


def remote_nodes(choices: Choices, nodes: int) -> float:
    """The nodes but its own that a token's experts are on, on average over random choices.

    At most `kept` groups of experts have choices: where groups lie on nodes, as many nodes.
    """
    pool = choices.experts * choices.kept / choices.groups
    among = smaller(nodes, choices.kept * larger(1, nodes / choices.groups)) if choices.groups > 1 else nodes
    missed = 1.0  # the probability that one node has none: C(E - E/N, k) / C(E, k)
    for taken in range(rounded(choices.number)):
        missed = missed * larger(0.0, pool - pool / among - taken) / larger(1.0, pool - taken)
    return among * (1 - missed) * (nodes - 1) / nodes

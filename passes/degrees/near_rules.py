"""Checks the gate `topology` against the cluster's levels and the degrees."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moec.grammar.checking.marks import refused
from moec.grammar.diagnostics import Diagnostic, Label, diagnose
from moec.grammar.spec import Moe, Spec, Topology
from moec.grammar.stated import stage_ranks

if TYPE_CHECKING:
    from moec.passes.degrees.degrees import Degrees


def near_problems(spec: Spec, degrees: Degrees) -> list[Diagnostic]:
    """A diagnostic for each level without a bandwidth, and for each node with too few experts."""
    problems: list[Diagnostic] = []
    experts_of = {layer: experts for experts in degrees.experts for layer in experts.layers}
    for number, moe in enumerate(spec.subject.mixtures):
        if moe is not None and isinstance(moe.gate, Topology):
            ep, etp = experts_of[number].ep, experts_of[number].etp
            problems += _unknown(spec, moe.gate)
            problems += _uneven(spec, moe.gate)
            problems += _far(spec, moe, moe.gate, num_near_experts(spec, moe, degrees.sharers, ep, etp))
    return list(dict.fromkeys(problems))


def _unknown(spec: Spec, gate: Topology) -> Iterator[Diagnostic]:
    for level in spec.cluster.levels:
        if level.size > 1 and level.bandwidth is None:
            span = level.span()
            yield diagnose(
                "MOE0327",
                gate.span(),
                "it prefers experts by the bandwidths of the cluster's levels",
                labels=[Label(span=span, message=f"`{level.name}` has none")] if span else (),
                help=f'state it per device and direction: `level "{level.name}" {{ …; bandwidth = 50GB/s }}`',
            )


def _uneven(spec: Spec, gate: Topology) -> Iterator[Diagnostic]:
    """Refuses pipeline stages that share nodes unevenly, so that ranks of one stage have another distance than those of
    the next."""
    ranks, sizes = stage_ranks(spec), itertools.accumulate((level.size for level in spec.cluster.levels), operator.mul)
    if any(max(ranks, size) % min(ranks, size) for size in sizes):
        what = f"`topology` with pipeline stages of {ranks} ranks, which share nodes unevenly,"
        yield refused(gate.span(), what, "use another `pp`, or `topk`")


def _far(spec: Spec, moe: Moe, gate: Topology, near: int) -> Iterator[Diagnostic]:
    """With `share` a token may choose again in its own node, which must then have k experts."""
    if gate.share is not None and near < gate.k:
        yield diagnose(
            "MOE0329",
            gate.span("share"),
            f"a token that chooses again in its own node finds {near} of {moe.num_experts} experts there",
            labels=[Label(span=span, message=f"each token wants {gate.k}")] if (span := gate.span("k")) else (),
            help="leave `share` out, take fewer experts per token, or a smaller `ep`",
        )


def num_near_experts(spec: Spec, moe: Moe, sharers: int, ep: int, etp: int) -> int:
    """The fewest experts that a token finds in its own node."""
    return min(near_parts(spec.cluster.ranks, ranks_of_node(spec), sharers, ep, etp)) * moe.num_experts // ep


def ranks_of_node(spec: Spec) -> int:
    """The ranks of a node: of everything inside of the cluster's outermost level."""
    return math.prod(level.size for level in spec.cluster.levels[:-1])


def near_parts(ranks: int, node: int, sharers: int, ep: int, etp: int) -> Iterator[int]:
    """For each data-parallel rank, how many places of `ep` lie in the node of every one of its ranks.

    A data-parallel rank is `sharers` consecutive ranks, a node `node` ranks. The ranks of an ep group are `etp` apart.
    """
    for first_rank in range(0, ranks, sharers):
        low, high = 0, ep
        for rank in range(first_rank, first_rank + sharers):
            first_of_group, node_start = rank // (ep * etp) * ep * etp + rank % etp, rank // node * node
            low = max(low, -((first_of_group - node_start) // etp))
            high = min(high, -((first_of_group - node_start - node) // etp))
        yield max(0, high - low)

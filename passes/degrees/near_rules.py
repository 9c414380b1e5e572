"""Checks the gate `topology` against the cluster's levels and the degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moec.grammar.diagnostics import Diagnostic, Label, diagnose
from moec.grammar.spec import Moe, Spec, Topology


def near_problems(spec: Spec, tp: int, ep_of: Mapping[int, int]) -> list[Diagnostic]:
    """A diagnostic for each level without a bandwidth, and for each node with too few experts.

    `ep_of` is the degree of each layer with a mixture.
    """
    problems: list[Diagnostic] = []
    for number, moe in enumerate(spec.subject.mixtures):
        if moe is not None and isinstance(moe.gate, Topology):
            problems += _unknown(spec, moe.gate)
            problems += _far(spec, moe, moe.gate, tp, ep_of[number])
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


def _far(spec: Spec, moe: Moe, gate: Topology, tp: int, ep: int) -> Iterator[Diagnostic]:
    """With `share` a token may choose again in its own node, which must then have k experts."""
    if gate.share is None:
        return
    near = min(near_parts(spec.cluster.ranks, ranks_of_node(spec), tp, ep)) * moe.num_experts // ep
    if near < gate.k:
        yield diagnose(
            "MOE0329",
            gate.span("share"),
            f"a token that chooses again in its own node finds {near} of {moe.num_experts} experts there",
            labels=[Label(span=span, message=f"each token wants {gate.k}")] if (span := gate.span("k")) else (),
            help="leave `share` out, take fewer experts per token, or a smaller `ep`",
        )


def ranks_of_node(spec: Spec) -> int:
    """The ranks of a node: of everything inside of the cluster's outermost level."""
    return math.prod(level.size for level in spec.cluster.levels[:-1])


def near_parts(ranks: int, node: int, tp: int, ep: int) -> Iterator[int]:
    """For each data-parallel rank, the ep ranks whose experts each of its tp ranks has in its own node of `node`.

    Of a rank these are neighbours: those of its expert-parallel group that are in its node.
    """
    for first_rank in range(0, ranks, tp):
        low, high = 0, ep
        for rank in range(first_rank, first_rank + tp):
            group, node_start = rank // ep * ep, rank // node * node
            low, high = max(low, node_start - group), min(high, node_start + node - group)
        yield max(0, high - low)

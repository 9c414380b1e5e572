"""Lowers the gates of mixtures; `_LOWERED` has a function for each gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moec.grammar.spec import Moe, Subject
from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import (
    AttentionRouter,
    Base,
    BatchPriority,
    Dense,
    DSelectK,
    ExpertChoice,
    GShard,
    Hash,
    NoisyTopK,
    SparseMixer,
    Switch,
    TopK,
)
from moec.passes.ir import Role
from moec.passes.ir.attribute_types import RoutingGroup
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates.attention_gate import attention_router
from moec.passes.lower.gates.dense_gate import dense
from moec.passes.lower.gates.dselect_gate import dselect_k
from moec.passes.lower.gates.gated import BIAS, Gated, GateInputs
from moec.passes.lower.gates.group_gates import base, expert_choice
from moec.passes.lower.gates.gshard_gate import gshard
from moec.passes.lower.gates.hash_gate import hash_gate
from moec.passes.lower.gates.nested_gate import nested_gate
from moec.passes.lower.gates.noisy_gate import noisy_topk
from moec.passes.lower.gates.placed_topology import PlacedTopology
from moec.passes.lower.gates.sparsemixer_gate import sparsemixer
from moec.passes.lower.gates.topk_gates import batch_priority, switch, topk
from moec.passes.lower.gates.topology_gate import topology

__all__ = ["BIAS", "Gated", "lower_gate"]


def lower_gate(
    b: Builder,
    subject: Subject,
    gate: Node,
    experts: int,
    h: str,
    by_role: Mapping[Role, str],
    group: RoutingGroup = "sequence",
    inner: Moe | None = None,
    ordered: bool = True,
    for_heads: bool = False,
) -> Gated:
    """Lowers any gate that moec compiles. `inner`: the mixture that each expert is, in a mixture of mixtures; the other
    parameters are as in `GateInputs`."""
    inputs = GateInputs(
        subject=subject, experts=experts, h=h, by_role=by_role, group=group, ordered=ordered, for_heads=for_heads
    )
    return _LOWERED[type(gate)](b, gate, inputs) if inner is None else nested_gate(b, gate, inner, inputs)


_LOWERED: dict[type[Node], Callable[[Builder, Node, GateInputs], Gated]] = {
    DSelectK: dselect_k,
    GShard: gshard,
    Base: base,
    BatchPriority: batch_priority,
    ExpertChoice: expert_choice,
    AttentionRouter: attention_router,
    Dense: dense,
    Hash: hash_gate,
    NoisyTopK: noisy_topk,
    SparseMixer: sparsemixer,
    Switch: switch,
    TopK: topk,
    PlacedTopology: topology,
}

"""Lowers the gates of a mixture of mixtures: an outer one, and one for each of its experts."""

from __future__ import annotations

from typing import Any

from moec.grammar.spec import Moe
from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Switch, TopK
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import TABLE, Builder, normal
from moec.passes.lower.gates.gated import Gated, GateInputs


def nested_gate(b: Builder, gate: Node, inner: Moe, inputs: GateInputs) -> Gated:
    """Weights and flat ids of pairs. `moe.gate.weight` has the rows of the outer gate, then those of each inner one."""
    outer, count, span = inputs.experts, inner.num_experts, gate.span()
    shape = (outer * (1 + count), inputs.subject.dim)
    weight = b.parameter("moe.gate.weight", shape, inputs.dtype, normal(), span, matrices=TABLE)
    logits = b.one(o.Router, inputs.h, weight, to="logits", span=span, rounds=inputs.subject.rounds_logits)
    options = _options(gate) | {f"inner_{name}": value for name, value in _options(inner.gate).items()}
    p, w, e = b.add(o.NestedRoute, logits, to="p w e", span=span, outer=outer, inner=count, **options)
    return Gated(w=w, e=e, p=p)


def _options(gate: Node) -> dict[str, Any]:
    if isinstance(gate, Switch):
        gate = TopK(k=1)
    assert isinstance(gate, TopK), "the language refuses other gates of mixtures of mixtures"
    return {"k": gate.k, "score": gate.score, "order": gate.order, "normalize": gate.normalize}

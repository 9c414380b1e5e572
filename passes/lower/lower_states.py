"""Lowers the blocks that give the states of layers their new values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Online
from moec.passes.ir import Block, Output, Value
from moec.passes.ir.ops import MoveBias, SumSources
from moec.passes.layer_names import layer_set_name
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates import BIAS


def with_update(block: Block, gate: Node | None, numbers: Sequence[int]) -> tuple[Block, ...]:
    """The block of the layers `numbers`, and the block that updates its states, if it has states.

    `gate` is the gate of the layers' mixture.
    """
    rule = getattr(gate, "bias", None)
    if gate is None or not isinstance(rule, Online):
        return (block,)
    update = _moved_bias(block, gate, rule.rate, f"update{layer_set_name(numbers)}")
    return replace(block, update=update.name), update


def _moved_bias(block: Block, gate: Node, rate: float, name: str) -> Block:
    """The block that moves the gate's biases by the rows that each expert got in the step."""
    counts, span = block.output("counts"), gate.span("bias")
    assert counts is not None
    loads_input = Value(name="counts", shape=counts.shape, dtype=counts.dtype, role="counts")
    b = Builder(name, [loads_input], span)
    (experts,) = next(state.shape for state in block.states if state.name == BIAS)
    assert isinstance(experts, int)
    bias = b.state(BIAS, (experts,), span)
    loads = b.one(SumSources, loads_input.name, to="loads", span=span)
    moved = b.one(MoveBias, bias, loads, to="moved", span=span, rate=rate)
    return b.block([Output(moved, "state", state=BIAS)], final=True)

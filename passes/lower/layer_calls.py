"""Lowers the calls of layers in `forward`, and the outputs of `forward`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moec.passes.ir import Block, Layer, Output
from moec.passes.ir import ops as o
from moec.passes.ir.interface import COUNTS, FORWARD
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.lower_replay import given_routes


def call_layer(b: Builder, block: Block, number: int, operands: Sequence[str], to: str = "x") -> list[Output]:
    """Calls `block` as layer `number`; returns its outputs. `to` names the first one, the residual stream."""
    b.blocks[block.name] = block
    names = [to, *(f"{output.role}_{number}" for output in block.outputs[1:])]
    results = b.add(o.Call, *operands, to=" ".join(names), span=block.span, block=block.name, layer=number)
    return [Output(name, output.role, number) for name, output in zip(results, block.outputs, strict=True)]


def called_layers(blocks: Iterable[Block]) -> tuple[Layer, ...]:
    """The layers that `forward` of these blocks calls."""
    calls = (op for block in blocks if block.name == FORWARD for op in block.ops if isinstance(op, o.Call))
    return tuple(Layer(call.layer, (call.block,)) for call in calls)


def with_one_balance(b: Builder, outputs: Sequence[Output]) -> list[Output]:
    """A layer's outputs beside the residual stream, with the balance terms of its experts and of its heads as one."""
    terms = [output for output in outputs if output.role == "balance"]
    if len(terms) < 2:
        return list(outputs)
    total = b.one(o.Add, *(output.name for output in terms), to="balance")
    added = Output(total, "balance")
    return [added if output is terms[0] else output for output in outputs if output not in terms[1:]]


def forward_outputs(b: Builder, result: Output, layer_outputs: Sequence[Output]) -> list[Output]:
    """The outputs of `forward`: its result, the sum of balance terms, the layers' choices, and the counts of each."""
    counts = [output for output in layer_outputs if output.role in COUNTS]
    balances = [output.name for output in layer_outputs if output.role == "balance"]
    balance = [Output(b.one(o.Add, *balances, to="balance"), "balance")] if balances else []
    return [result, *balance, *given_routes(b, layer_outputs), *counts]

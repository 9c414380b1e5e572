"""Lowers a `layer` file: one mixture, with input and output sharded like a model's residual stream."""

from __future__ import annotations

from moec.grammar.spec import LayerModule, Subject
from moec.passes.ir import Block, Output, Value
from moec.passes.layer_names import layer_set_name
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.layer_calls import call_layer, forward_outputs
from moec.passes.lower.lower_losses import TOKENS, balance_blocks_of_vectors
from moec.passes.lower.lower_mixture import mixture
from moec.passes.lower.lower_states import with_update


def layer_blocks(layer: LayerModule, subject: Subject) -> list[Block]:
    """The layer's body, `forward`, which calls it as layer 0, and the blocks of its balance terms and states, if any.

    `forward` takes x `[batch, sequence, dim]` in the layer's dtype and gives y of the same type, balance terms and
    counts.
    """
    span = layer.span()
    x = Value(name="x", shape=(*TOKENS, subject.dim), dtype=subject.dtype, role="residual")
    b = Builder(f"layers{layer_set_name([0])}", [x], span)
    mixed, outputs = mixture(b, subject, layer.moe, "x", {})
    body, *updates = with_update(b.block([Output(mixed, "residual"), *outputs]), layer.moe.gate, [0])
    forward = _forward_block(x, body)
    balance = balance_blocks_of_vectors(x, span) if body.output("balance") is not None else ()
    return [body, forward, *balance, *updates]


def _forward_block(x: Value, body: Block) -> Block:
    b = Builder("forward", [x], body.span)
    y, *outputs = call_layer(b, body, 0, ["x"], to="y")
    return b.block(forward_outputs(b, Output(y.name, "residual"), outputs))

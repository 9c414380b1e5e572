"""Lowers a `layer` file: one mixture by itself, its input and output sharded as a model's residual stream is."""

from __future__ import annotations

from moec.grammar.spec import LayerModule
from moec.passes.builder import Builder
from moec.passes.ir import Block, Value
from moec.passes.ir import ops as o
from moec.passes.layers import layer_set_name
from moec.passes.losses import TOKENS, balance_blocks_of_vectors
from moec.passes.mixture import mixture


def layer_blocks(layer: LayerModule) -> list[Block]:
    """The layer's body, `forward`, which calls it as layer 0, and the blocks of its balance terms where it has any.

    `forward` takes x `[batch, sequence, dim]` in the layer's dtype and gives y of the same type, balance terms and
    counts.
    """
    subject, span = layer.subject, layer.span()
    x = Value(name="x", shape=(*TOKENS, subject.dim), dtype=subject.dtype)
    b = Builder(f"layers{layer_set_name([0])}", [x], span)
    mixed, balance, counts = mixture(b, subject, layer.moe, "x")
    body = b.block([mixed, counts, *balance])
    forward = _forward_block(x, body)
    return [body, forward, *(balance_blocks_of_vectors(x, span) if balance else ())]


def _forward_block(x: Value, body: Block) -> Block:
    b = Builder("forward", [x], body.span)
    b.blocks[body.name] = body
    names = "y counts_0 balance_0" if len(body.outputs) == 3 else "y counts_0"
    y, counts, *balance = b.add(o.Call, "x", to=names, span=body.span, block=body.name, layer=0)
    return b.block([y, *(b.one(o.Add, name, to="balance") for name in balance), counts])

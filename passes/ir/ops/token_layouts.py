"""Layout rules that ops over tokens share. Tokens are the leading dims, `[batch, sequence]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.layout import REPLICATED, Layout, Partial, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, layout_of
from moec.passes.ir.value import Value

if TYPE_CHECKING:
    from moec.passes.ir.program import Block

Blocks = Mapping[str, "Block"]
TOKEN_DIMS = 2


def reduced_layout(value: Value, meshes: Meshes) -> Layout:
    """The layout of `value` after its partial sums are reduced to the layout of the residual stream."""
    layout = layout_of(value)
    for axis in dict.fromkeys((*meshes.tokens.axes, *layout.axes)):
        if isinstance(layout.get(axis), Partial):
            layout = layout.replace(axis, meshes.tokens.get(axis) if value.shape else None)
    return layout


def follow_tokens(op: Op, activations: Sequence[Value], meshes: Meshes, parameters: int = 0) -> Placing:
    """The rule of a per-token op: activations stay sharded over tokens, parameters are replicated.

    All activations get the layout of the first.
    """
    layout = reduced_layout(activations[0], meshes)
    for axis, placement in layout.placements:
        if not (isinstance(placement, Shard) and placement.dim < TOKEN_DIMS):
            raise LayoutError(f"{op.mnemonic} has no rule for {axis}:{placement}")
    operand_layouts = (layout,) * len(activations) + (REPLICATED,) * parameters
    return Placing(operand_layouts, (layout,) * len(op.results))


def sum_tokens(op: Op, activations: Sequence[Value], meshes: Meshes) -> Placing:
    """The rule of an op that sums over tokens: its one result is a partial sum where the tokens are sharded."""
    tokens = follow_tokens(op, activations, meshes).operands
    return Placing(tokens, (tokens[0].as_partial(),))


def own_tokens(op: Op, activations: int, meshes: Meshes, parameters: int = 0) -> Placing:
    """The rule of a mixture's op: every rank has different tokens, so no token is sent twice.

    Behind the activations there are `parameters` or settings, which are replicated.
    """
    operand_layouts = (meshes.own_tokens,) * activations + (REPLICATED,) * parameters
    return Placing(operand_layouts, (meshes.own_tokens,) * len(op.results))

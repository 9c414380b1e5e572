"""Layout rules that ops over tokens share. Tokens are the leading dims, `[batch, sequence]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.layout import REPLICATED, Layout, Partial, Shard
from moec.passes.ir.op import LayoutError, Op, Placing, layout_of
from moec.passes.ir.value import Value

if TYPE_CHECKING:
    from moec.passes.ir.program import Block

Blocks = Mapping[str, "Block"]


def follow_tokens(op: Op, activations: Sequence[Value], parameters: int = 0) -> Placing:
    """The rule of an op that treats tokens alike: activations sharded over tokens stay so, parameters are whole.

    Every activation must be laid out like the first.
    """
    layout = layout_of(activations[0])
    for axis, placement in layout.placements:
        if not (isinstance(placement, Shard) and placement.dim < 2):
            raise LayoutError(f"{op.mnemonic} has no rule for {axis}:{placement}")
    wanted = (layout,) * len(activations) + (REPLICATED,) * parameters
    return Placing(wanted, (layout,) * len(op.results))


def sum_tokens(op: Op, activations: Sequence[Value]) -> Placing:
    """The rule of an op that sums over tokens: its one result is a partial sum where the tokens are sharded."""
    tokens = follow_tokens(op, activations).operands
    return Placing(tokens, (Layout.of(dict.fromkeys(tokens[0].axes, Partial())),))

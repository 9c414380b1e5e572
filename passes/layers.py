"""What blocks, meshes and groups call the layers they serve."""

from __future__ import annotations

from collections.abc import Sequence

from moec.grammar.rules import ranges


def layer_set_name(layers: Sequence[int]) -> str:
    """`[4..31]`, `[1..23 step 2]`, `[7]` or `[3,7..9]`, of ascending numbers."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"[{first}]"
    step = layers[1] - first
    if list(layers) == list(range(first, last + 1, step)):
        return f"[{first}..{last}]" if step == 1 else f"[{first}..{last} step {step}]"
    return f"[{','.join(ranges(layers))}]"

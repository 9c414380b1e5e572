"""Names of sets of layers, for blocks, meshes and groups."""

from __future__ import annotations

from collections.abc import Sequence

from moec.grammar.layer_numbers import ranges

MAX_LISTED = 8
"""Ranges that a name lists. Every call repeats the name of its block, so listing all would make plans quadratic."""


def layer_set_name(layers: Sequence[int]) -> str:
    """`[4..31]`, `[1..23 step 2]`, `[7]`, `[3,7..9]`, or the first eight `and 5 more]`, of ascending numbers.

    Disjoint sets have different names, because a name begins with the first layer.
    """
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"[{first}]"
    step = layers[1] - first
    if list(layers) == list(range(first, last + 1, step)):
        return f"[{first}..{last}]" if step == 1 else f"[{first}..{last} step {step}]"
    listed = ranges(layers)
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return f"[{','.join(listed[:MAX_LISTED])}{more}]"

"""The tiles that devices run, in Triton's interpreter in float32, against plain torch in float64.

Small layers, with at least twice as many steps along each depth as a loop has buffers, several tiles each way, several
groups of tiles, an empty expert, and widths that are no multiples of tiles. `test_interpreted.py` runs this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from canonical import DEVICES, LAYERS, TOKENS, ways_on
from given_experts import choices_with, of_rows, of_tokens

from moec.codegen.kernels.product_shapes import GROUP
from moec.codegen.kernels.tiles import KERNELS, Ways


@cache
def chosen() -> dict[str, Ways]:
    """Every choice of tiles for the canonical layers, under the first that has it."""
    named = {
        f"{name}, {tokens} tokens on {device}": ways_on(device, layer, tokens)
        for device in DEVICES
        for name, layer in LAYERS.items()
        for tokens in TOKENS
    }
    first: dict[Ways, str] = {}
    for name, ways in named.items():
        first.setdefault(ways, name)
    return {name: ways for ways, name in first.items()}


def enough(ways: Ways, extra: int) -> tuple[list[int], int, int]:
    """Rows of each expert, the model dim and the hidden width of a layer that shows each product's loop."""
    tiles = {kernel: tile for kernel in KERNELS if (tile := ways.tile(kernel))}
    deep = {kernel: 2 * tile.stages * tile.depth for kernel, tile in tiles.items()}
    dim = max(deep["up"], deep["down_backward"], 2 * tiles["down"].columns, 2 * tiles["up_backward"].columns)
    hidden = max(deep["down"], deep["up_backward"] // 2, tiles["up"].columns, 2 * tiles["down_backward"].columns)
    most = max(deep["up_weights"], deep["down_weights"], 2 * ways.rows)
    counts = [most + 5, 0, 1, ways.rows + 2]
    # Experts of two rows have a tile each, until there are more tiles than a group has.
    full = sum(-(-count // ways.rows) for count in counts)
    return [*counts, *[2] * (GROUP + 1 - full)], dim + extra, hidden + extra


def cases() -> Iterator[object]:
    for name, ways in chosen().items():
        for extra in (0, 8):
            for gathered in (False, True):
                yield pytest.param(
                    ways, extra, gathered, id=f"{name}, {extra} more, {'rows' if gathered else 'tokens'}"
                )


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "extra", "gathered"), list(cases()))
def test_the_tiles_of_devices_agree_with_plain_torch(ways: Ways, extra: int, gathered: bool) -> None:
    counts, dim, hidden = enough(ways, extra)
    if gathered:
        halves = [[count // 3 for count in counts], [count - count // 3 for count in counts]]
        given = of_rows(halves, dim, hidden, bias=True, weighted=True, ways=str(ways))
    else:
        given = of_tokens(choices_with(counts, 2), len(counts), dim, hidden, ways=str(ways))
    given.require_right()

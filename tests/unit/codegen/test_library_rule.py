"""The rule for products by a library, at the canonical layers."""

from __future__ import annotations

import pytest

from moec.codegen.kernels.library_rule import libraries_for
from moec.codegen.kernels.tile_rule import tiles_for
from moec.codegen.kernels.tiles import KERNELS

# dim, hidden, experts, k
MIXTRAL = (4096, 14336, 8, 2)
QWEN3 = (2048, 768, 128, 8)
OLMOE = (2048, 1024, 64, 8)


def by_library(
    layer: tuple[int, int, int, int], tokens: int = 8192, dtype: str = "bf16", device: str = "h200"
) -> set[str]:
    dim, hidden, experts, k = layer
    rows = tokens * k
    height = tiles_for(dtype, rows, experts, (dim, hidden), True, "hopper").rows
    return set(libraries_for(dtype, rows, experts, (dim, hidden), True, device, height))


def test_every_product_of_a_large_hidden_width_is_a_library_s() -> None:
    for tokens in (8192, 32768):
        assert by_library(MIXTRAL, tokens) == set(KERNELS)


@pytest.mark.parametrize("layer", [QWEN3, OLMOE])
def test_small_hidden_widths_keep_our_products_which_gather_and_activate(layer: tuple[int, int, int, int]) -> None:
    assert by_library(layer) == by_library(layer, 32768) == set()


@pytest.mark.parametrize(
    "given",
    [
        {"device": "a100"},  # loops on the host
        {"device": "b200"},  # unmeasured
        {"device": "interpreter"},
        {"dtype": "fp16"},
        {"dtype": "fp32"},
        {"tokens": 256},  # 64 rows per expert: another tile
    ],
)
def test_our_products_stay_where_the_library_is_a_loop_or_unmeasured(given: dict[str, object]) -> None:
    assert by_library(MIXTRAL, **given) == set()  # type: ignore[arg-type]


def test_widths_that_are_no_multiples_of_8_keep_our_products() -> None:
    assert by_library((4100, 14340, 8, 2)) == set()


def test_a_product_that_needs_passes_around_it_must_win_by_more() -> None:
    """At one hidden width, down needs nothing beside it; up gathers before and activates after."""
    found = by_library((2048, 2048, 8, 2))
    assert "down" in found
    assert "up" not in found

"""The rule for products by a library, at the canonical layers, and what a plan then lists."""

from __future__ import annotations

from support.tables import each_row

import moec
from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.plan_kernels import kernels_of
from moec.codegen.kernels.product_shapes import DownShape, UpShape
from moec.codegen.kernels.stored_tiles import Choice, choose
from moec.codegen.kernels.tiles import KERNELS, Tile

# dim, hidden, experts, k
MIXTRAL = (4096, 14336, 8, 2)
QWEN3 = (2048, 768, 128, 8)
OLMOE = (2048, 1024, 64, 8)


def choice(layer: tuple[int, int, int, int], tokens: int = 8192, dtype: str = "bf16", device: str = "h200") -> Choice:
    dim, hidden, experts, k = layer
    family = {"a100": "ampere", "mi300x": "cdna"}.get(device, "hopper")
    return choose(dtype, tokens * k, experts, (dim, hidden), True, device=device, family=family, tuned={})


def by_library(found: Choice) -> set[str]:
    return {kernel for kernel in KERNELS if found.ways.tile(kernel) is None}


def test_large_hidden_widths_take_a_library_where_it_is_predicted_to_win_and_say_so() -> None:
    for tokens in (8192, 32768):
        found = choice(MIXTRAL, tokens)
        assert {"down", "up_backward", "down_weights", "up_weights"} <= by_library(found)
        assert "predicted gains of grouped_mm: " in found.reason
        assert all(f"{kernel} 1." in found.reason for kernel in by_library(found))


@each_row("layer", [QWEN3, OLMOE])
def test_small_hidden_widths_keep_our_products_which_gather_and_activate(layer: tuple[int, int, int, int]) -> None:
    for tokens in (8192, 32768):
        found = choice(layer, tokens)
        assert not by_library(found)
        assert "grouped_mm" not in found.reason


@each_row(
    "given",
    [
        {"device": "a100"},  # a loop on the host
        {"device": "mi300x"},
        {"device": "b200"},  # unmeasured
        {"device": "interpreter"},
        {"dtype": "fp16"},  # a loop on the host
        {"dtype": "fp32"},
        {"tokens": 64},
    ],
)
def test_our_products_stay_where_the_library_is_a_loop_or_unmeasured(given: dict[str, object]) -> None:
    assert not by_library(choice(MIXTRAL, **given))  # type: ignore[arg-type]


def test_widths_that_are_no_multiples_of_8_and_too_many_experts_keep_our_products() -> None:
    assert not by_library(choice((4100, 14340, 8, 2)))
    assert not by_library(choice((4096, 14336, 1024, 2), 1_000_000))


def test_a_product_that_needs_passes_around_it_gains_less_than_one_that_does_not() -> None:
    dim, _, experts, k = MIXTRAL
    found = choice((dim, 2048, experts, k), 32768)
    assert {"down", "up_backward"} <= by_library(found)
    assert isinstance(found.ways.up, Tile)


PLAN = """
model "wide" {
  vocab = 256; dim = 4096; depth = 1; dtype = bf16
  layers { attention = mha(heads = 32); moe { experts = 8 * swiglu(14336); gate = topk(2) } }
}
cluster "one" { device = h200; level "process" { size = 1 } }
train { batch = 4; sequence = 2048; optimizer = adamw(lr = 1e-4) }
"""


def test_a_plan_lists_the_kernels_around_a_library_s_products_and_none_of_those() -> None:
    kernels = kernels_of(moec.compile(PLAN))
    (up,) = (kernel.shape for kernel in kernels if isinstance(kernel.shape, UpShape))
    (down,) = (kernel.shape for kernel in kernels if isinstance(kernel.shape, DownShape))
    assert up.backward is None
    assert down.tile is None
    (around,) = (kernel for kernel in kernels if isinstance(kernel.shape, AroundShape))
    assert "gather" in around.launched
    assert "scatter" not in around.launched  # no rows from other ranks
    assert ("through" in around.launched) == (down.backward is None)

"""Rendered kernels compiled ahead of time for other devices; registers and spills are bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.product_shapes import DownShape, UpShape
from moec.codegen.kernels.row_shapes import PlacesShape, QueuesShape, SlotsShape
from moec.codegen.kernels.shapes import GatedShape, RouteShape, TilesShape
from moec.codegen.kernels.stored_tiles import TileKey, choose
from moec.codegen.kernels.tile_candidates import around
from moec.codegen.kernels.tile_rule import in_bulk, tiles_for
from moec.codegen.kernels.tiles import Tile, Ways
from moec.passes.ir.activations import ACTIVATIONS
from moec.runtime.backends.triton.triton_compile import TARGETS, compile_kernels
from moec.runtime.tune.tune_trial import Bench, fits

FAMILIES = {"sm_80": "ampere", "sm_90": "hopper", "sm_100": "hopper", "gfx942": "cdna"}
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""The limits of a block."""

SPILLED = 256
"""Spilled bytes per thread: few, in the widest epilogues and where rows are not aligned."""

# dim, hidden, experts, k: the canonical layers, and one whose every number is odd.
LAYERS = {
    "mixtral 8x7b": (4096, 14336, 8, 2),
    "qwen3 30b": (2048, 768, 128, 8),
    "olmoe": (2048, 1024, 64, 8),
    "deepseek v3": (7168, 2048, 256, 8),
    "gpt-oss 120b": (2880, 2880, 128, 4),
    "odd": (100, 75, 6, 3),
}
GATES = [("softmax", False, True), ("softmax", True, False), ("sigmoid", False, False), ("sigmoid", True, True)]


def shapes(
    layer: tuple[int, int, int, int], dtype: str, activation: str, tokens: int, gathered: bool, target: str
) -> Iterator[KernelShape]:
    """All kernels of a layer."""
    yield GatedShape(hidden=layer[0], activation="geglu", dtype=dtype)
    yield from rows(layer, dtype)
    yield from products(layer, dtype, activation, tokens, gathered, target)


def rows(layer: tuple[int, int, int, int], dtype: str) -> Iterator[KernelShape]:
    """The kernels that count choices and move rows, with a capacity too."""
    dim, _, experts, k = layer
    yield QueuesShape(experts=experts, k=k)
    yield QueuesShape(experts=experts, k=1)
    yield PlacesShape(k=k, dim=dim, dtype=dtype, weights="fp32")


def products(
    layer: tuple[int, int, int, int],
    dtype: str,
    activation: str,
    tokens: int,
    gathered: bool,
    target: str,
    bias: bool = False,
) -> Iterator[KernelShape]:
    """The experts'."""
    dim, hidden, experts, k = layer
    gated = ACTIVATIONS[activation].gated
    ways = tiles_for(dtype, tokens * k, experts, (dim, hidden), gated, FAMILIES[target])
    yield TilesShape(experts=experts, rows=ways.rows)
    # Rows from other ranks lie where they came, with weights; those of tokens that stayed are gathered from these.
    known = (experts, dim, hidden, activation, dtype, gathered, 0 if gathered else k, bias)
    bulk = in_bulk(dtype, (dim, hidden), FAMILIES[target])
    yield UpShape.of(*known, ways, bulk=bulk)
    down = DownShape.of(*known, ways, bulk=bulk, weighted=gathered)
    yield down
    yield AroundShape.of(down)


def require_fits(shape: KernelShape, target: str) -> None:
    """Compiles the kernel and checks the device's limits."""
    made = list(compile_kernels(shape, target))
    assert made
    for kernel in made:
        assert kernel.registers <= (512 if target == "gfx942" else 255), kernel
        assert kernel.spilled <= SPILLED, kernel
        assert kernel.shared <= SHARED[target], kernel


SMALL = Ways(*[Tile(64, 64, 32, 4, 3)] * 6)
"""Tiles that compile in a third of a second each. Those that devices run are compiled by the slow tests."""


def small_products(target: str, bias: bool = True) -> tuple[UpShape, DownShape]:
    """Both projections over weighted rows from several ranks."""
    known = (8, 256, 128, "swiglu", "bf16", True, 0, bias, SMALL)
    bulk = in_bulk("bf16", (256, 128), FAMILIES[target])
    return UpShape.of(*known, bulk=bulk), DownShape.of(*known, bulk=bulk, weighted=True)


def test_every_template_but_those_of_products_compiles() -> None:
    _, down = small_products("sm_90")
    for shape in (
        gate_of_deepseek_v3(experts=16),
        gate_of_deepseek_v3(experts=16).backward_shape,
        GatedShape(hidden=256, activation="geglu", dtype="bf16"),
        QueuesShape(experts=8, k=2),
        PlacesShape(k=2, dim=256, dtype="bf16", weights="fp32"),
        SlotsShape(experts=256, ranks=64, slots=5),
        TilesShape(experts=8, rows=64),
        AroundShape.of(down),
    ):
        require_fits(shape, "sm_90")


def test_every_product_of_experts_compiles() -> None:
    for shape in small_products("sm_90"):
        require_fits(shape, "sm_90")


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_90"])
def test_a_product_compiles_for(target: str) -> None:
    up, _ = small_products(target)
    (made,) = compile_kernels(up, target, ("up",))
    assert 32 < made.registers <= (512 if target == "gfx942" else 255)
    assert made.spilled == 0
    assert 0 < made.shared <= SHARED[target]


@pytest.mark.slow
def test_all_kernels_of_a_layer_compile() -> None:
    require_fits(RouteShape(experts=64, k=8, score="softmax", after=False, normalize=True, dtype="fp32"), "sm_90")
    for shape in shapes(LAYERS["olmoe"], "bf16", "swiglu", 8192, True, "sm_90"):
        require_fits(shape, "sm_90")


def gate_of_deepseek_v3(experts: int = 256, groups: int = 8, dtype: str = "fp32") -> RouteShape:
    """arXiv 2412.19437, section 4.2: sigmoid scores, biases, 4 of 8 groups, 8 of 256 experts, scaled by 2.5."""
    return RouteShape(
        experts=experts,
        k=8,
        score="sigmoid",
        after=False,
        normalize=True,
        scale=2.5,
        groups=groups,
        keep_groups=4,
        biased=True,
        dtype=dtype,
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_gates_with_groups_of_any_size_compile(target: str) -> None:
    for experts, groups in ((256, 8), (160, 8), (72, 6), (2048, 16)):
        for dtype in ("fp32", "fp64"):
            for shape in (
                gate_of_deepseek_v3(experts, groups, dtype),
                gate_of_deepseek_v3(experts, groups).backward_shape,
            ):
                require_fits(shape, target)


@pytest.mark.slow
def test_experts_of_weighted_rows_in_places_compile() -> None:
    dim, hidden, experts, k = LAYERS["olmoe"]
    ways = tiles_for("bf16", 8192 * k, experts, (dim, hidden), True, "hopper")
    require_fits(DownShape.of(experts, dim, hidden, "swiglu", "bf16", False, 0, False, ways, weighted=True), "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("gathered", [False, True])
def test_experts_with_biases_compile(gathered: bool) -> None:
    for shape in products(LAYERS["gpt-oss 120b"], "bf16", "swiglu", 8192, gathered, "sm_90", bias=True):
        require_fits(shape, "sm_90")


DEVICES = {"a100": ("ampere", "sm_80"), "h100": ("hopper", "sm_90")}


def require_no_spill(device: str, layer: tuple[int, int, int, int], rows: int) -> None:
    """With rows gathered and weighted: the most registers."""
    family, target = DEVICES[device]
    dim, hidden, experts, _ = layer
    ways = choose("bf16", rows, experts, (dim, hidden), True, device=device, family=family, tuned={}).ways
    known = (experts, dim, hidden, "swiglu", "bf16", True, 0, False, ways)
    bulk = in_bulk("bf16", (dim, hidden), family)
    for shape in (UpShape.of(*known, bulk=bulk), DownShape.of(*known, bulk=bulk, weighted=True)):
        for kernel in compile_kernels(shape, target):
            assert kernel.spilled == 0, kernel
            assert kernel.shared <= SHARED[target], kernel


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [layer for name, layer in LAYERS.items() if name != "odd"])
def test_no_default_tile_of_a_canonical_layer_spills(layer: tuple[int, int, int, int], device: str) -> None:
    for each in (16, 200, 1000):
        require_no_spill(device, layer, each * layer[2])


def test_tuning_leaves_out_tiles_that_spill_or_do_not_fit_or_do_not_compile() -> None:
    default, wide, deep = Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(128, 128, 128, 8, 4)
    shape = DownShape.of(8, 4096, 14336, "swiglu", "bf16", True, 0, False, Ways(*[default] * 6))
    h100 = Bench(torch.device("cpu"), "h100", "sm_90", SHARED["sm_90"])
    assert wide in around("down_backward", default, 128, TileKey("bf16", "many", 8, 4096, 14336, True), h100.shared)
    assert fits(shape, "down_backward", default, wide, h100)
    # Its sums alone are 256 registers of a thread.
    assert not fits(shape, "down_backward", default, replace(wide, warps=4), h100)
    assert not fits(shape, "down_backward", default, deep, h100)
    assert not fits(shape, "down_backward", default, Tile(128, 48, 64, 8, 4), h100)
    # Without a compile target only the buffers are known: 3 · 64 · (128 + 256) · 2 bytes are 144 KiB.
    assert fits(shape, "down_backward", default, wide, replace(h100, target=None))
    assert not fits(shape, "down_backward", default, wide, replace(h100, target=None, shared=99 * 1024))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_canonical_layers_compile(layer: tuple[int, int, int, int], target: str) -> None:
    _, _, experts, k = layer
    for score, after, normalize in GATES:
        shape = RouteShape(experts=experts, k=k, score=score, after=after, normalize=normalize, dtype="fp32")
        require_fits(shape, target)
    for tokens in (64, 1024, 32768):
        for gathered in (False, True):
            for shape in shapes(layer, "bf16", "swiglu", tokens, gathered, target):
                require_fits(shape, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_every_activation_and_dtype_compiles(dtype: str, target: str) -> None:
    if (dtype, target) == ("fp64", "gfx942"):
        pytest.skip("plain torch multiplies them (`no_fp64`)")
    for activation in ACTIVATIONS:
        for layer in (LAYERS["olmoe"], LAYERS["odd"]):
            for shape in products(layer, dtype, activation, 8192, True, target):
                require_fits(shape, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_places_of_every_dtype_and_number_of_experts_compile(target: str) -> None:
    for experts in (1, 3, 1000, 2048):
        require_fits(QueuesShape(experts=experts, k=1), target)
    for experts, ranks, slots in ((2, 2, 2), (2048, 1024, 3), (2048, 2, 1030)):
        require_fits(SlotsShape(experts=experts, ranks=ranks, slots=slots), target)
    for dtype in ("fp16", "fp32", "fp64"):
        for layer in (LAYERS["olmoe"], LAYERS["odd"]):
            for shape in rows(layer, dtype):
                require_fits(shape, target)

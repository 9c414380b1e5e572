"""Products of the canonical layers as compiled: nothing is lost of what their tiles were chosen for.

A product that lost its pipeline gives the same numbers, only slowly: no other test would see it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import triton
from canonical import DEVICES, LAYERS, TOKENS, products_of, ways_on

from moec.codegen.kernels.model.model_device import DEVICES as MODELS
from moec.codegen.kernels.model.model_tiles import Schedule, estimated_blocks
from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.resources import complaints
from moec.codegen.kernels.tiles import KERNELS, Tile, Ways
from moec.runtime.backends.triton.triton_compile import compile_kernels

QWEN3 = "Qwen3-30B-A3B"


def lost(name: str, tokens: int, device: str, gathered: bool) -> Iterator[str]:
    """What the compiler lost of each product, with the name of its kernel."""
    target, _ = DEVICES[device]
    layer = LAYERS[name]
    for shape in products_of(name, ways_on(device, layer, tokens), gathered, device):
        for made in compile_kernels(shape, target, KERNELS, disassemble=True):
            tile = shape.tile_of(made.kernel)
            assert tile is not None
            bulk = shape.persistent(made.kernel)
            expected = estimated_blocks(made.kernel, Schedule.of(tile, bulk), layer, MODELS[device])
            for complaint in complaints(made, tile, blocks=expected, bulk=bulk):
                yield f"{made.kernel} {tile}: {complaint}"


def test_the_products_of_a_canonical_layer_lose_nothing_in_small_tiles() -> None:
    """They compile faster than those that devices run, which are the slow test's."""
    tile = Tile(64, 64, 64, 4, 3)
    for shape in products_of(QWEN3, Ways(*[tile] * 6)):
        for made in compile_kernels(shape, "sm_90", KERNELS, disassemble=True):
            assert list(complaints(made, tile, bulk=shape.persistent(made.kernel))) == [], made.kernel


LOADS = [("h100", tokens, False) for tokens in TOKENS] + [("h100", 8192, True), ("a100", 8192, False)]
"""Devices, tokens, and whether rows arrived from several ranks."""


KNOWN = {
    ("3.6", "gpt-oss-120b", "a100", 8192, False): ["up_weights 128x128x64w8s3: a thread spills 8 bytes"],
}
"""What is lost, by the version of Triton; an entry that is mended must go."""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "tokens", "gathered"), LOADS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_products_of_every_canonical_layer_lose_nothing(
    name: str, device: str, tokens: int, gathered: bool
) -> None:
    version = ".".join(triton.__version__.split(".")[:2])
    assert list(lost(name, tokens, device, gathered)) == KNOWN.get((version, name, device, tokens, gathered), [])


def plain(shape: ProductShape, kernel: str, *_: object) -> dict[str, int]:
    """As many stages as buffers are wanted, as if no load went through indices."""
    tile = shape.tile_of(kernel)
    assert tile is not None
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def test_a_pipeline_that_is_lost_behind_an_indirect_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(128, 128, 64, 8, 4)
    up, _ = products_of(QWEN3, ways_on("h100", LAYERS[QWEN3], 8192).with_way("up_weights", tile))
    monkeypatch.setattr(ProductShape, "options", plain)
    (made,) = compile_kernels(up, "sm_90", ["up_weights"])
    assert list(complaints(made, tile)) == ["the loop has 2 buffers, its tile asks for 4"]

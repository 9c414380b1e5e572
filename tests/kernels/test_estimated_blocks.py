"""The model's estimate of blocks per multiprocessor, against the kernels that the compiler made."""

from __future__ import annotations

import pytest
from support.kernel_tables import LAYERS, rule

from moec.codegen.kernels.model.model_device import DEVICES
from moec.codegen.kernels.model.model_tiles import Schedule, estimated_blocks
from moec.codegen.kernels.product_shapes import DownShape, ProductShape, UpShape
from moec.codegen.kernels.tile_rule import in_bulk
from moec.codegen.kernels.tiles import KERNELS
from moec.runtime.backends.triton.triton_compile import compile_kernels


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1024, 8192])
@pytest.mark.parametrize("name", LAYERS)
def test_estimated_blocks_are_those_of_compiled_kernels(name: str, tokens: int) -> None:
    layer = LAYERS[name]
    ways = rule(layer, tokens)
    known = (layer.experts, layer.dim, layer.hidden, "swiglu", layer.dtype, False, layer.k, False, ways)
    bulk = in_bulk(layer.dtype, (layer.dim, layer.hidden), "hopper")
    shapes: list[ProductShape] = [UpShape.of(*known, bulk=bulk), DownShape.of(*known, bulk=bulk)]
    made = {each.kernel: each.blocks for shape in shapes for each in compile_kernels(shape, "sm_90", ())}
    persistent = {kernel: shape.persistent(kernel) for kernel in KERNELS for shape in shapes if shape.tile_of(kernel)}
    estimated = {
        kernel: estimated_blocks(kernel, Schedule.of(tile, persistent[kernel]), layer, DEVICES["h200"])
        for kernel in KERNELS
        if (tile := ways.tile(kernel)) is not None
    }
    assert estimated == {kernel: made[kernel] for kernel in estimated}

"""Part b of `gpu.py`: each product of the large layers in each candidate way, timed alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
import triton
from gpu_compile import on_all_cores
from gpu_rows import Measurement
from layer_problem import Shape

from moec.codegen.kernels.plan_kernels import PlanProducts
from moec.codegen.kernels.product_shapes import DownShape, ProductShape, UpShape
from moec.codegen.kernels.stored_tiles import key_of
from moec.codegen.kernels.tile_candidates import around, heights
from moec.codegen.kernels.tile_rule import in_bulk, tiles_for
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Kernel, Tile, Ways, parse_way
from moec.runtime.backends.triton.triton_tiles import device_name, target_at
from moec.runtime.backends.triton.triton_warm import compile_one
from moec.runtime.tune.tune_layer import Results, TunedLayer, agree

SHAPES = {
    "cuda": (Shape(8192, 2048, 768, 128, 8), Shape(8192, 4096, 14336, 8, 2), Shape(8192, 7168, 2048, 256, 8)),
    "cpu": (Shape(32, 32, 16, 4, 2),),
}
"""Qwen3-30B-A3B, Mixtral 8x7B, DeepSeek-V3."""

MOST = {"cuda": 10, "cpu": 1}
"""Candidates of a product for each height of tiles, the nearest to the default first."""

SHARED = 232448
"""Bytes of shared memory of a block, of Hopper."""

LIBRARIES = {"cuda": ("grouped_mm",), "cpu": ()}


def measurements(device: str) -> list[Measurement]:
    """Of part b: first the default's height of every layer, then the other heights of every layer.

    A layer's candidates are compiled on all cores before they are timed. Products take turns, so that wherever it
    stops, all six have their nearest candidates.
    """
    made = []
    for tier in range(2):
        for shape in SHAPES[device]:
            group, arguments = f"b {tier} {shape}", {"part": "b", "shape": str(shape)}
            if device == "cuda":
                compiling = arguments | {"tier": tier}
                key = f"b compiled {shape} {tier}"
                made.append(Measurement(key, f"{group} compiled", "gpu_part_b:compiled", compiling, 150.0))
            for kernel, way in candidates(shape, device, tier):
                timing = arguments | {"kernel": kernel, "way": way}
                made.append(Measurement(f"b {shape} {kernel} {way}", group, "gpu_part_b:product", timing))
    return made


def candidates(shape: Shape, device: str, tier: int) -> list[tuple[Kernel, str]]:
    """Products and ways. Tier 0: the defaults, libraries, then tiles as high, by nearness; tier 1: other heights."""
    default = default_of(shape, device)
    found: dict[tuple[Kernel, str], None] = {}
    if tier == 0:
        found |= {(kernel, str(default.of(kernel))): None for kernel in KERNELS}
        found |= {(kernel, library): None for library in LIBRARIES[device] for kernel in KERNELS}
    first, *others = heights(_tile(default, "up"))
    for rows in others if tier else [first]:
        near = {kernel: _near(shape, device, kernel, rows) for kernel in KERNELS}
        for number in range(MOST[device]):
            found |= {(kernel, str(near[kernel][number])): None for kernel in KERNELS if number < len(near[kernel])}
    return list(found)


def _near(shape: Shape, device: str, kernel: Kernel, rows: int) -> list[Tile]:
    """The nearest tiles of a product at a height; gradients of weights have none, so they come with the default's."""
    default = _tile(default_of(shape, device), kernel)
    if kernel in ROW_KERNELS:
        return list(islice(around(kernel, default, rows, _key(shape, device), SHARED), MOST[device]))
    of_default = rows == _tile(default_of(shape, device), "up").rows
    return list(islice(around(kernel, default, None, _key(shape, device), SHARED), MOST[device] * of_default))


def _dtype(device: str) -> str:
    return "fp32" if device == "cpu" else "bf16"


def _key(shape: Shape, device: str) -> Any:
    return key_of(_dtype(device), shape.tokens * shape.k, shape.experts, (shape.dim, shape.hidden), True)


@lru_cache
def default_of(shape: Shape, device: str) -> Ways:
    """The rule's tiles, also where libraries are chosen or moec ships others: what it ships comes from here."""
    given = (_dtype(device), shape.tokens * shape.k, shape.experts, (shape.dim, shape.hidden), True)
    return tiles_for(*given, "hopper")


def _tile(ways: Ways, kernel: Kernel) -> Tile:
    tile = ways.tile(kernel)
    assert tile is not None, f"the default of {kernel} is no tile"
    return tile


def with_way(shape: Shape, device: str, kernel: Kernel, way: str) -> Ways:
    """The default with one product in another way, and with it the other products of rows in tiles as high."""
    ways, chosen = default_of(shape, device), parse_way(way)
    if isinstance(chosen, Tile) and kernel in ROW_KERNELS and chosen.rows != ways.rows:
        near = {other: _near(shape, device, other, chosen.rows)[0] for other in ROW_KERNELS}
        ways = Ways(**near, down_weights=ways.down_weights, up_weights=ways.up_weights)
    return ways.with_way(kernel, chosen)


# ---- in the processes that measure ---------------------------------------------------------------------


@lru_cache(maxsize=1)
def _layer(text: str, device: str) -> tuple[TunedLayer, Results]:
    shape = Shape.parse(text)
    layer = TunedLayer(_products(shape, device, default_of(shape, device)), torch.device(device))
    return layer, layer.results(default_of(shape, device))


def _products(shape: Shape, device: str, ways: Ways) -> PlanProducts:
    up, down = (of(shape, device, ways) for of in (_up, _down))
    return PlanProducts(_key(shape, device), up, down, shape.tokens * shape.k, 1)


def _known(shape: Shape, device: str) -> tuple[Any, ...]:
    return shape.experts, shape.dim, shape.hidden, "swiglu", _dtype(device), False, shape.k, False


def _up(shape: Shape, device: str, ways: Ways) -> UpShape:
    return UpShape.of(*_known(shape, device), ways, bulk=_bulk(shape, device))


def _down(shape: Shape, device: str, ways: Ways) -> DownShape:
    return DownShape.of(*_known(shape, device), ways, bulk=_bulk(shape, device))


def _shape_of(shape: Shape, device: str, kernel: Kernel, ways: Ways) -> ProductShape:
    return (_down if kernel.startswith("down") else _up)(shape, device, ways)


def _bulk(shape: Shape, device: str) -> bool:
    on = target_at(torch.device(device))
    return in_bulk(_dtype(device), (shape.dim, shape.hidden), on.family, on.name)


def product(device: str, part: str, shape: str, kernel: Kernel, way: str) -> dict[str, Any]:
    """Milliseconds of one product alone, in the form in which they calibrate the model of the kernels.

    Raises `AssertionError` if the layer gives other numbers with it.
    """
    found = Shape.parse(shape)
    layer, exact = _layer(shape, device)
    ms, results = layer.product(with_way(found, device, kernel, way), kernel)
    assert agree(results, exact, _dtype(device)), "the layer gives other numbers with it"
    flops = 2 * found.tokens * found.k * found.dim * found.hidden * (2 if kernel.startswith("up") else 1)
    return {
        "device": device_name(torch.device(device)),
        "experts": found.experts,
        "dim": found.dim,
        "hidden": found.hidden,
        "gated": True,
        "dtype": _dtype(device),
        "k": found.k,
        "tokens": found.tokens,
        "load": "uniform",
        "triton": triton.__version__,
        "bulk": _shape_of(found, device, kernel, default_of(found, device)).persistent(kernel),
        "usual": way == str(default_of(found, device).of(kernel)),
        "ms": ms,
        "tflops": flops / ms / 1e9,
    }


def compiled(device: str, part: str, shape: str, tier: int) -> dict[str, Any]:
    """Compiles all candidates on all cores, for Triton's cache, from which the launches then take them."""
    found = Shape.parse(shape)
    every = list(_to_compile(found, device, tier))
    said = on_all_cores(_compile, every)
    bad = {f"{kernel} {shape.tile_of(kernel)}": why for (shape, kernel), why in zip(every, said, strict=True) if why}
    return {"compiled": len(said) - len(bad), "did_not": bad}


def _to_compile(shape: Shape, device: str, tier: int) -> Iterator[tuple[ProductShape, Kernel]]:
    seen: set[tuple[ProductShape, Kernel]] = set()
    for kernel, way in candidates(shape, device, tier):
        if isinstance(parse_way(way), Tile):
            made = _shape_of(shape, device, kernel, with_way(shape, device, kernel, way))
            if (made, kernel) not in seen:
                seen.add((made, kernel))
                yield made, kernel


def _compile(shape: ProductShape, kernel: Kernel) -> str:
    """Why a kernel does not compile; empty if it does."""
    try:
        compile_one(shape, kernel, torch.device("cuda", 0), {})
    except Exception as error:  # noqa: BLE001 - the row of this way says it again when it is timed
        return type(error).__name__
    return ""

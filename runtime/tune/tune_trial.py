"""Candidates of a layer's products on one device: whether they fit, whether they are right, and their times.

A product's candidates are the libraries that can compute it here, and tiles around the default's, or the rule's where a
library is the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice

import torch

from moec.codegen.kernels.fitting import buffer_bytes
from moec.codegen.kernels.plan_kernels import PlanProducts
from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.tile_candidates import around, heights
from moec.codegen.kernels.tiles import ROW_KERNELS, Kernel, Library, Tile, Way, Ways
from moec.runtime.backends import BackendError, forced_backend
from moec.runtime.backends.triton.libraries.library_choice import MODULES
from moec.runtime.tune.tune_layer import TunedLayer, agree


@dataclass(frozen=True, slots=True)
class Bench:
    """The device to measure on: `target` is the compile target, `shared` the bytes of shared memory per block."""

    device: torch.device
    name: str
    target: str | None
    shared: int


class Trial:
    """Times a layer's products alone, each way of a product once."""

    def __init__(self, products: PlanProducts, layer: TunedLayer, bench: Bench, max_tiles: int) -> None:
        self.default, self._tiles = layer.default(), layer.tiles()
        self.misfits = self.wrong = 0
        self._products, self._layer, self._bench, self._max_tiles = products, layer, bench, max_tiles
        self._exact = layer.results(self.default)
        self._times: dict[tuple[Kernel, Way], float] = {}
        self._fitting: dict[tuple[Kernel, int | None], list[Tile]] = {}
        self._libraries = libraries_of(products, bench.device)

    def heights(self) -> tuple[int, ...]:
        """Rows of a tile of row products to try, the default's first."""
        return heights(_tile_of(self._tiles, "up"))

    def at_height(self, rows: int) -> Ways | None:
        """The row products with their nearest tiles of `rows` rows; None if no such tile of one of them fits."""
        ways: dict[str, Way] = {}
        for kernel in ROW_KERNELS:
            tiles = self._candidates(kernel, rows)
            if not tiles:
                return None
            ways[kernel] = tiles[0]
        return Ways(**ways, down_weights=self.default.down_weights, up_weights=self.default.up_weights)

    def fastest(self, kernel: Kernel, ways: Ways, rows: int | None) -> Way:
        """The fastest way of a product beside `ways`; of ties, that of `ways`, then the nearest to the default."""
        ways_to_try = [ways.of(kernel), *self._candidates(kernel, rows), *self._libraries]
        return min(ways_to_try, key=lambda way: self.time(kernel, ways.with_way(kernel, way)))

    def time(self, kernel: Kernel, ways: Ways) -> float:
        """Milliseconds of a product; infinite for a way that does not run or gives other numbers than the default."""
        key = kernel, ways.of(kernel)
        if key not in self._times:
            self._times[key] = self._measure(kernel, ways)
        return self._times[key]

    def measured_times(self) -> Mapping[tuple[Kernel, Way], float]:
        """Milliseconds of every way that ran and agreed."""
        return {key: milliseconds for key, milliseconds in self._times.items() if milliseconds < math.inf}

    def _measure(self, kernel: Kernel, ways: Ways) -> float:
        from triton.errors import TritonError

        try:
            milliseconds, results = self._layer.product(ways, kernel)
        except (TritonError, BackendError):  # a launch needs more shared memory than the device has
            self.misfits += 1
            return math.inf
        if not agree(results, self._exact, self._products.key.dtype):
            self.wrong += 1
            return math.inf
        return milliseconds

    def _candidates(self, kernel: Kernel, rows: int | None) -> list[Tile]:
        default = _tile_of(self._tiles, kernel)
        if (kernel, rows) not in self._fitting:
            nearest = around(kernel, default, rows, self._products.key, self._bench.shared)
            tiles = list(islice(nearest, self._max_tiles))
            shape = self._products.down if kernel.startswith("down") else self._products.up
            fitting = [tile for tile in tiles if tile == default or fits(shape, kernel, default, tile, self._bench)]
            self.misfits += len(tiles) - len(fitting)
            self._fitting[kernel, rows] = fitting
        return self._fitting[kernel, rows]


def _tile_of(ways: Ways, kernel: Kernel) -> Tile:
    tile = ways.tile(kernel)
    assert tile is not None, f"{kernel} has no tile in {ways}"
    return tile


def libraries_of(products: PlanProducts, device: torch.device) -> list[Library]:
    """The libraries that can compute such products here; none where MOEC_BACKEND forces our own."""
    if forced_backend() == "triton":
        return []
    key, up = products.key, products.up
    widths = (key.dim, key.hidden, 2 * key.hidden if key.gated else key.hidden)
    problem = (device, key.dtype, up.experts, widths)
    return [library for library, module in MODULES.items() if module.complaint(*problem) is None]


def fits(shape: ProductShape, kernel: Kernel, default: Tile, tile: Tile, bench: Bench) -> bool:
    """Whether a kernel of `tile` compiles for the device, fits it, and spills no more than with the default tile.

    Without a compile target only the buffers are compared: a tile whose buffers do not fit would run as a smaller one.
    """
    if bench.target is None:
        return buffer_bytes(tile, shape.dtype) <= bench.shared
    usage, allowed = (
        _spilled_and_shared(shape.with_tile(kernel, candidate), kernel, bench.target) for candidate in (tile, default)
    )
    if usage is None or allowed is None:
        return allowed is None
    return usage[0] <= allowed[0] and usage[1] <= bench.shared


@cache
def _spilled_and_shared(shape: ProductShape, kernel: Kernel, target: str) -> tuple[int, int] | None:
    """Bytes that a shape's kernel spills, and its bytes of shared memory; None if it does not compile."""
    from triton.errors import TritonError

    from moec.runtime.backends.triton.triton_compile import compile_kernels

    try:
        (compiled,) = compile_kernels(shape, target, (kernel,))
    except (TritonError, RuntimeError):  # the compiler's passes raise RuntimeError
        return None
    return compiled.spilled, compiled.shared

"""One layer's experts with random weights and choices, which `moec tune` runs in each candidate way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moec.codegen.emit import DTYPES
from moec.codegen.kernels.plan_kernels import PlanProducts
from moec.codegen.kernels.tile_rule import tiles_for
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Kernel, Ways
from moec.runtime.backends.triton import triton_tiles
from moec.runtime.backends.triton.product_clock import Call, timed
from moec.runtime.backends.triton.triton_experts import expert_mlp, expert_mlp_backward
from moec.runtime.backends.triton.triton_mixture import mixture_mlp, mixture_mlp_backward

MOST_ROWS, MOST_PER_EXPERT = 32_768, 256
"""Bounds of the rows in all and per expert; the larger bound holds. More rows take memory and change no ranking."""

BOUNDS: Mapping[str, float] = {"bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 1e-5, "fp64": 1e-12}
"""Largest difference of two tiles' results, relative to the largest number: two units in the last place where results
are rounded to 16 bits, else the error of another order of sums. A wrong kernel's difference is near 1."""

WARM_UP_MS, MEASURE_MS = 25, 100

Results = tuple[Tensor, ...]
"""The layer's result, and the gradients of its rows and of both projections' weights and biases."""


class TunedLayer:
    """Experts of the plan's shape, forward and backward, with fixed random numbers."""

    def __init__(self, products: PlanProducts, device: torch.device) -> None:
        key, shape = products.key, products.up
        self.key, self.activation = key, (shape.activation, shape.clamp, shape.alpha)
        self.rows, self.k = min(products.rows, max(MOST_ROWS, MOST_PER_EXPERT * shape.experts)), shape.k
        if self.k:
            self.rows -= self.rows % self.k
        self.device = device
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=DTYPES[key.dtype])

        parts = 2 if key.gated else 1
        x_shape = (1, self.rows // self.k, key.dim) if self.k else (self.rows, key.dim)
        self._x, self._grad = random(*x_shape), random(*x_shape)
        self._up = random(shape.experts, parts, key.hidden, key.dim).mul_(key.dim**-0.5)
        self._down = random(shape.experts, key.dim, key.hidden).mul_(key.hidden**-0.5)
        self._counts = random_counts(self.rows, products.sources, shape.experts, generator)
        self._biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if shape.bias:
            self._biases = random(*self._up.shape[:-1]), random(*self._down.shape[:-1])
        # Even loads would be multiples of a tile's rows, and hide the empty rows of an expert's last tile.
        scores = torch.rand(1, x_shape[1] if self.k else 1, shape.experts, generator=generator, device=device)
        self._choices = scores.topk(self.k or 1).indices
        weights_shape = self._choices.shape if self.k else (self.rows,)
        self._weights = torch.full(weights_shape, 1 / (self.k or 1), device=device)

    def default(self) -> Ways:
        """The ways of an untuned plan: shipped ones, or the rule's."""
        experts, widths = self._up.shape[0], (self.key.dim, self.key.hidden)
        problem = (self.device, self.key.dtype, self.rows, experts, widths, self.activation[0])
        return triton_tiles.ways_at(None, *problem)

    def tiles(self) -> Ways:
        """The default's tiles; for products that a library computes by default, the rule's tiles of the same height."""
        default, widths = self.default(), (self.key.dim, self.key.hidden)
        family = triton_tiles.family_of(self.device)
        rule = tiles_for(self.key.dtype, self.rows, self._up.shape[0], widths, self.key.gated, family)
        if any(default.tile(kernel) for kernel in ROW_KERNELS):
            as_high = {
                kernel: replace(tile, rows=default.rows) for kernel in ROW_KERNELS if (tile := rule.tile(kernel))
            }
            rule = replace(rule, **as_high)
        return Ways(*(default.tile(kernel) or rule.of(kernel) for kernel in KERNELS))

    def results(self, ways: Ways) -> Results:
        """The layer's results with its products computed in these ways."""
        return self._run(str(ways))

    def milliseconds(self, ways: Ways) -> float:
        """Milliseconds of the whole layer, forward and backward: the median of several runs by the device's clock."""
        return self._clock(lambda: self._run(str(ways)))

    def product(self, ways: Ways, kernel: Kernel) -> tuple[float, Results]:
        """Milliseconds of one product alone, with the conversions that its way needs, and the layer's results."""
        milliseconds: list[float] = []
        with timed(kernel, lambda call: milliseconds.append(self._clock(call))):
            results = self._run(str(ways))
        assert len(milliseconds) == 1, f"{kernel} ran {len(milliseconds)} times"
        return milliseconds[0], results

    def _clock(self, call: Call) -> float:
        """The median of several calls with a cold cache by the device's clock; in the interpreter, one call."""
        if self.device.type == "cuda":
            from triton.testing import do_bench

            return float(do_bench(call, warmup=WARM_UP_MS, rep=MEASURE_MS, return_mode="median"))
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def _run(self, ways: str) -> Results:
        parameters = (self._up, self._down, *self._biases)
        if self.k:
            experts = (*parameters, *self.activation, ways)
            mixed, counts, hidden, *extras = mixture_mlp(self._x, self._choices, self._weights, *experts)
            saved = (self._x, hidden, counts, *extras, self._weights)
            mixture_inputs: tuple[Any, ...] = (*saved, *experts)
            grad_x, _, *grads = mixture_mlp_backward(self._grad, *mixture_inputs)
            return mixed, grad_x, *grads
        matrices = (*parameters, self._weights, *self.activation, ways)
        out, hidden, table = expert_mlp(self._x, self._counts, *matrices)
        row_inputs: tuple[Any, ...] = (hidden, table, self._counts, *matrices)
        *grads, _ = expert_mlp_backward(self._grad, self._x, *row_inputs)
        return out, *grads


def random_counts(rows: int, sources: int, experts: int, generator: torch.Generator) -> Tensor:
    """Counts int64 [sources, experts] of `rows` rows, each in a uniformly random cell."""
    num_cells = sources * experts
    cells_of_rows = torch.randint(num_cells, (rows,), generator=generator, device=generator.device)
    return cells_of_rows.bincount(minlength=num_cells).view(sources, experts)


def agree(results: Results, exact: Results, dtype: str) -> bool:
    """Whether the results of two tiles differ only by rounding; False if there is a NaN."""
    return all(
        bool((result - reference).abs().max() <= BOUNDS[dtype] * reference.abs().max())
        for result, reference in zip(results, exact, strict=True)
        if result.numel()
    )

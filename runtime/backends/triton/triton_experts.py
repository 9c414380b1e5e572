"""Experts' feed-forwards by rendered kernels: grouped products without a host synchronisation.

In the experts' order, the rows of one expert are contiguous, whichever source they came from: `hidden` and the values
between the two products are in this order. Rows from one source are in it already; rows from several sources are
gathered when they are read and scattered when they are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.codegen.kernels.shapes import DownShape, ProductShape, TilesShape, UpShape
from moec.passes.ir.activations import PARAMETERS
from moec.runtime.backends.torch import torch_experts
from moec.runtime.backends.triton.triton_launch import Kernels, dtype_name, kernels_of, no_fp64, too_many
from moec.runtime.backends.triton.triton_tiles import tiles_at

Activation = tuple[str, *tuple[float | None, ...]]
"""A word of `ACTIVATIONS` and its parameters, as in `kind_of`."""


def expert_mlp(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    *parameters: float | None,
) -> tuple[Tensor, Tensor]:
    if too_many(counts.shape[1]) or no_fp64(rows.device, rows.dtype):
        return torch_experts.expert_mlp(rows, counts, up, down, up_bias, down_bias, weights, activation, *parameters)
    rows, up, down = rows.contiguous(), up.contiguous(), down.contiguous()
    out, hidden = torch.empty_like(rows), rows.new_empty((rows.shape[0], *up.shape[1:3]))
    if out.numel():
        weighted = weights is not None
        work = Work.of(
            rows, rows.shape[0], counts, up, up_bias is not None, (activation, *parameters), weighted=weighted
        )
        activated = rows.new_empty((rows.shape[0], up.shape[2]))
        work.up.product("up", up.shape[2], rows, *work.order, up, *present(up_bias), hidden, activated)
        given = (activated, down, *present(down_bias), *work.order, *present(weights))
        work.down.product("down", rows.shape[1], *given, out)
    return out, hidden


def expert_mlp_backward(
    grad: Tensor,
    rows: Tensor,
    hidden: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    *parameters: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if too_many(counts.shape[1]) or no_fp64(rows.device, rows.dtype):
        plain = torch_experts.expert_mlp_backward
        return plain(grad, rows, hidden, counts, up, down, up_bias, down_bias, weights, activation, *parameters)
    grad, rows, hidden, up, down = (t.contiguous() for t in (grad, rows, hidden, up, down))
    grad_rows, grad_up, grad_down = torch.empty_like(rows), torch.empty_like(up), torch.empty_like(down)
    of_biases = torch_experts.new_biases(up, up_bias, down_bias)
    of_weights = rows.new_empty(0) if weights is None else weights.new_zeros(weights.shape)
    if not rows.numel():
        return grad_rows, grad_up.zero_(), grad_down.zero_(), *of_biases, of_weights
    num_rows, weighted = rows.shape[0], weights is not None
    work = Work.of(rows, num_rows, counts, up, up_bias is not None, (activation, *parameters), weighted=weighted)
    _, parts, width, dim = up.shape
    grad_hidden, activated = torch.empty_like(hidden), rows.new_empty((num_rows, width))
    given, made = (grad, down, *work.order), (hidden, grad_hidden, activated)
    if weights is None:
        work.down.product("down_backward", width, *given, *made)
    else:
        num_parts = -(-width // work.down.shape.tile.columns)
        sums = rows.new_empty((num_parts, num_rows), dtype=torch.promote_types(rows.dtype, torch.float32))
        given = (grad, down, *present(down_bias), *work.order, weights.contiguous(), sums)
        work.down.product("down_backward", width, *given, *made, more=(num_rows,))
        of_weights = sums.sum(0).to(weights.dtype)
    work.down.weights("down_weights", (dim, width), grad, activated, *work.order, grad_down)
    work.up.product("up_backward", dim, grad_hidden, up, *work.order, grad_rows)
    work.up.weights("up_weights", (parts * width, dim), grad_hidden, rows, *work.order, grad_up)
    if up_bias is not None:
        of_up, of_down = of_biases
        work.up.bias("up_bias", parts * width, grad_hidden, of_up)
        work.down.bias("down_bias", dim, grad, *work.order, *present(weights), of_down)
    return grad_rows, grad_up, grad_down, *of_biases, of_weights


def present(given: Tensor | None) -> tuple[Tensor, ...]:
    """An optional tensor as kernel arguments: kernels have no argument for a missing one."""
    return () if given is None else (given.contiguous(),)


@dataclass(frozen=True, slots=True)
class _Table:
    """Each expert's rows and tiles: row offsets [E + 1], and each tile's expert and first row."""

    offsets: Tensor
    experts: Tensor
    starts: Tensor

    @property
    def num_tiles(self) -> int:
        """A bound from shapes alone: ⌈rows / rows of a tile⌉ and one more for each expert."""
        return self.experts.shape[0]


@dataclass(frozen=True, slots=True)
class _Products:
    """The kernels of one projection, and their table."""

    shape: ProductShape
    kernels: Kernels
    table: _Table

    def product(self, kernel: str, width: int, *arguments: Tensor, more: tuple[int, ...] = ()) -> None:
        """A product of all rows with a matrix of `width` columns."""
        table = self.table
        grid = (table.num_tiles * -(-width // self.shape.tile.columns),)
        tables = (table.offsets, table.experts, table.starts, table.num_tiles)
        self.kernels.launch(kernel, grid, *arguments, *tables, *more, **self._options(kernel))

    def weights(self, kernel: str, shape: tuple[int, int], *arguments: Tensor) -> None:
        """The gradient [E, *shape] of a projection's weights."""
        m, n = (self.kernels.blocks(size, "BW")[0] for size in shape)
        grid = (m * n, self.table.offsets.shape[0] - 1)
        self.kernels.launch(kernel, grid, *arguments, self.table.offsets, **self._options(kernel))

    def bias(self, kernel: str, width: int, *arguments: Tensor) -> None:
        """The gradient [E, width] of a projection's bias."""
        grid = (*self.kernels.blocks(width, "BB"), self.table.offsets.shape[0] - 1)
        self.kernels.launch(kernel, grid, *arguments, self.table.offsets, **self._options(kernel))

    def _options(self, kernel: str) -> dict[str, int]:
        return {"num_warps": self.shape.warps(kernel), "num_stages": self.shape.tile.stages}


@dataclass(frozen=True, slots=True)
class Work:
    """Both projections over the same rows; `order` maps the experts' order to rows, empty if rows are in it.

    If each row is a choice of a token, `order` has the choices.
    """

    up: _Products
    down: _Products
    order: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        x: Tensor,
        num_rows: int,
        counts: Tensor,
        up: Tensor,
        bias: bool,
        activation: Activation,
        k: int = 0,
        *choices: Tensor,
        weighted: bool = False,
    ) -> Work:
        """For `num_rows` rows of x's width, dtype and device; with `k`, each row is a choice of `choices` [num_rows].

        `weighted`: each row has a weight.
        """
        sources, experts = counts.shape
        if not k:
            _refuse_other_sum(counts, num_rows)
        dtype, hidden, dim, gathered = dtype_name(x), up.shape[2], x.shape[-1], sources > 1
        tiles = tiles_at(x.device, dtype, num_rows, experts, (dim, hidden), activation[0])
        places = kernels_of(TilesShape(experts=experts, rows=tiles.up.rows), x)

        counts = counts.contiguous()
        num_tiles = -(-num_rows // tiles.up.rows) + experts
        offsets, of_tiles, starts = (
            counts.new_empty(n, dtype=torch.int32) for n in (experts + 1, num_tiles, num_tiles)
        )
        places.launch(
            "table", places.blocks(num_tiles), counts, offsets, of_tiles, starts, sources, num_rows, num_tiles
        )
        order: tuple[Tensor, ...] = choices
        if gathered:
            order = (counts.new_empty(num_rows, dtype=torch.int32),)
            places.launch("order", (experts, sources), counts, offsets, *order, sources, num_rows)

        table = _Table(offsets, of_tiles, starts)
        known = (experts, dim, hidden, activation[0], dtype, gathered, k, bias)
        parameters: dict[str, Any] = dict(zip(PARAMETERS, activation[1:], strict=False))
        up_shape = UpShape.of(*known, tiles.up, **parameters)
        down_shape = DownShape.of(*known, tiles.down, weighted=weighted, **parameters)
        return cls(
            _Products(up_shape, kernels_of(up_shape, x), table),
            _Products(down_shape, kernels_of(down_shape, x), table),
            order,
        )


def _refuse_other_sum(counts: Tensor, num_rows: int) -> None:
    """Raises `RuntimeError`, only on CPU, without synchronisation; on devices the table stays within `num_rows`."""
    if counts.device.type == "cpu" and int(counts.sum()) != num_rows:
        message = f"moec::expert_mlp: the counts add up to {int(counts.sum())}, but there are {num_rows} rows"
        raise RuntimeError(message)

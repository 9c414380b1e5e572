"""Experts' feed-forwards by rendered kernels: grouped products without a host synchronisation.

In the experts' order, the rows of one expert are contiguous, whichever source they came from: `hidden` and the values
between the two products are in this order. Rows from one source are in it already; rows from several sources are
gathered when they are read and scattered when they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.product_shapes import DownShape, UpShape
from moec.codegen.kernels.tile_rule import in_bulk
from moec.codegen.kernels.tiles import Ways
from moec.passes.ir.activations import PARAMETERS
from moec.runtime.backends.torch import torch_experts
from moec.runtime.backends.triton.expert_products import ExpertProducts
from moec.runtime.backends.triton.libraries.library_products import LibraryProducts
from moec.runtime.backends.triton.libraries.library_rows import Around
from moec.runtime.backends.triton.triton_launch import dtype_name, kernels_of, no_fp64, too_many
from moec.runtime.backends.triton.triton_projection import Projection
from moec.runtime.backends.triton.triton_table import Table
from moec.runtime.backends.triton.triton_tiles import target_at, ways_at

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
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if too_many(counts.shape[1]) or no_fp64(rows.device, rows.dtype):
        plain, biases = torch_experts.expert_mlp, (up_bias, down_bias)
        return plain(rows, counts, up, down, *biases, weights, activation, clamp, alpha)
    rows, up, down = rows.contiguous(), up.contiguous(), down.contiguous()
    num_rows = rows.shape[0]
    layer = ExpertsLayer.of(
        rows, up, up_bias, counts.shape[0], (activation, clamp, alpha), weighted=weights is not None
    )
    _refuse_other_sum(counts, num_rows)
    products = layer.forward(num_rows, counts, ways)
    if not num_rows:
        return torch.empty_like(rows), rows.new_empty((0, *up.shape[1:3])), products.table.saved
    hidden, activated = products.up(products.source(rows), up, up_bias)
    return products.down(activated, down, down_bias, weights), hidden, products.table.saved


def expert_mlp_backward(
    grad: Tensor,
    rows: Tensor,
    hidden: Tensor,
    table: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if too_many(counts.shape[1]) or no_fp64(rows.device, rows.dtype):
        plain, biases = torch_experts.expert_mlp_backward, (up_bias, down_bias)
        return plain(grad, rows, hidden, table, counts, up, down, *biases, weights, activation, clamp, alpha)
    grad, rows, hidden, up, down = (t.contiguous() for t in (grad, rows, hidden, up, down))
    grad_biases = torch_experts.new_biases(up, torch_experts.shapes_of((up_bias, down_bias)))
    grad_weights = rows.new_empty(0) if weights is None else weights.new_zeros(weights.shape)
    if not rows.numel():
        return torch.empty_like(rows), torch.zeros_like(up), torch.zeros_like(down), *grad_biases, grad_weights
    layer = ExpertsLayer.of(
        rows, up, up_bias, counts.shape[0], (activation, clamp, alpha), weighted=weights is not None
    )
    products = layer.backward(rows.shape[0], table, ways)
    grad_source = products.source(grad)
    grad_hidden, activated, parts = products.down_backward(grad_source, hidden, down, down_bias, weights)
    if parts is not None:
        grad_weights = parts.sum(0).to(grad_weights.dtype)
    grad_down = products.down_weights(grad_source, activated, down.shape)
    del grad_source, activated
    grad_rows = products.up_backward(grad_hidden, up)
    grad_up = products.up_weights(grad_hidden, products.source(rows), up.shape)
    if up_bias is not None:
        products.biases(grad_hidden, grad, weights, *grad_biases)
    return grad_rows, grad_up, grad_down, *grad_biases, grad_weights


def expert_mlp_backward_split(
    grad: Tensor, rows: Tensor, hidden: Tensor, table: Tensor, counts: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Callable[[], torch_experts.Gradients]]:
    up, down, up_bias, down_bias, weights, *activation, ways = operands
    if not rows.numel() or too_many(counts.shape[1]) or no_fp64(rows.device, rows.dtype):
        return torch_experts.expert_mlp_backward_split(grad, rows, hidden, table, counts, *operands)
    grad, rows, hidden, up, down = (t.contiguous() for t in (grad, rows, hidden, up, down))
    grad_weights, shapes = rows.new_empty(0), torch_experts.shapes_of((up, down, up_bias, down_bias))
    layer = ExpertsLayer.of(rows, up, up_bias, counts.shape[0], tuple(activation), weighted=weights is not None)
    products = layer.backward(rows.shape[0], table, ways)
    grad_hidden, activated, parts = products.down_backward(products.source(grad), hidden, down, down_bias, weights)
    if parts is not None:
        grad_weights = parts.sum(0).to(weights.dtype)
    of_weights = partial(products.of_weights, grad, rows, grad_hidden, activated, weights, shapes)
    return products.up_backward(grad_hidden, up), grad_weights, of_weights


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """A layer's experts on a device: the values that its kernels are rendered for, besides their tiles.

    With `k`, each row is a choice of a token, and the kernels gather tokens; else rows arrived from `sources` ranks.
    `weighted`: each row has a weight.
    """

    device: torch.device
    dtype: str
    experts: int
    dim: int
    hidden: int
    activation: str
    parameters: tuple[float | None, ...]
    bias: bool
    sources: int
    k: int
    weighted: bool

    @classmethod
    def of(
        cls,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        sources: int,
        activation: Activation,
        *,
        k: int = 0,
        weighted: bool = False,
    ) -> ExpertsLayer:
        """For rows or tokens x [..., D] and up [E, G, F, D]."""
        experts, _, hidden, dim = up.shape
        name, *parameters = activation
        bias = up_bias is not None
        fields = (x.device, dtype_name(x), experts, dim, hidden, name, tuple(parameters), bias)
        return cls(*fields, sources, k, weighted)

    def forward(self, num_rows: int, counts: Tensor, ways: str | None) -> ExpertProducts:
        """Its kernels over a new table of these counts [sources, E]. With `k` the caller fills the table's order."""
        chosen = self._ways(num_rows, ways)
        table = Table.empty(counts, num_rows, self.experts, chosen.rows)
        if num_rows:
            table.fill(counts)
        return self._products(chosen, table)

    def backward(self, num_rows: int, saved: Tensor, ways: str | None) -> ExpertProducts:
        """Its kernels over the table that forward saved."""
        chosen = self._ways(num_rows, ways)
        return self._products(chosen, Table.of(saved, num_rows, self.experts, chosen.rows))

    def _ways(self, num_rows: int, ways: str | None) -> Ways:
        widths = (self.dim, self.hidden)
        return ways_at(ways, self.device, self.dtype, num_rows, self.experts, widths, self.activation)

    def _products(self, ways: Ways, table: Table) -> ExpertProducts:
        up, down, around = _shapes(self, ways)
        up_kernels, down_kernels = (Projection(shape, kernels_of(shape, table.saved), table) for shape in (up, down))
        library = LibraryProducts(Around(around, table.num_rows, table.offsets, table.order))
        order = (table.order,) if self.sources > 1 or self.k else ()
        return ExpertProducts(ways, up_kernels, down_kernels, library, table, order)


@lru_cache(maxsize=1024)
def _shapes(layer: ExpertsLayer, ways: Ways) -> tuple[UpShape, DownShape, AroundShape]:
    """The shapes of a layer's kernels: those of both projections, and those around a library's products."""
    common = (layer.experts, layer.dim, layer.hidden, layer.activation, layer.dtype, layer.sources > 1, layer.k)
    numbers: dict[str, Any] = dict(zip(PARAMETERS, layer.parameters, strict=True))
    target = target_at(layer.device)
    numbers["bulk"] = in_bulk(layer.dtype, (layer.dim, layer.hidden), target.family, target.name)
    up = UpShape.of(*common, layer.bias, ways, **numbers)
    down = DownShape.of(*common, layer.bias, ways, weighted=layer.weighted, **numbers)
    return up, down, AroundShape.of(down)


def _refuse_other_sum(counts: Tensor, num_rows: int) -> None:
    """Raises `RuntimeError`, only on CPU, without synchronisation; on devices the table stays within `num_rows`."""
    if counts.device.type == "cpu" and int(counts.sum()) != num_rows:
        message = f"moec::expert_mlp: the counts add up to {int(counts.sum())}, but there are {num_rows} rows"
        raise RuntimeError(message)

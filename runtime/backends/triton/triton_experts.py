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

from moec.codegen.kernels.shapes import DownShape, UpShape
from moec.codegen.kernels.tiles import Ways
from moec.passes.ir.activations import PARAMETERS
from moec.runtime.backends.torch import torch_experts
from moec.runtime.backends.triton.triton_launch import dtype_name, kernels_of, no_fp64, present, too_many
from moec.runtime.backends.triton.triton_projection import Projection
from moec.runtime.backends.triton.triton_table import Table
from moec.runtime.backends.triton.triton_tiles import ways_at

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
    num_rows, width = rows.shape[0], up.shape[2]
    out, hidden = torch.empty_like(rows), rows.new_empty((num_rows, *up.shape[1:3]))
    layer = ExpertsLayer.of(
        rows, up, up_bias, counts.shape[0], (activation, clamp, alpha), weighted=weights is not None
    )
    _refuse_other_sum(counts, num_rows)
    work = layer.forward(num_rows, counts, ways)
    if num_rows:
        activated = rows.new_empty((num_rows, width))
        work.up.product("up", width, rows, *work.order, up, *present(up_bias), hidden, activated)
        given = (activated, down, *present(down_bias), *work.order, *present(weights))
        work.down.product("down", rows.shape[1], *given, out)
    return out, hidden, work.table.saved


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
    grad_rows, grad_up, grad_down = torch.empty_like(rows), torch.empty_like(up), torch.empty_like(down)
    of_biases = torch_experts.new_biases(up, up_bias, down_bias)
    of_weights = rows.new_empty(0) if weights is None else weights.new_zeros(weights.shape)
    if not rows.numel():
        return grad_rows, grad_up.zero_(), grad_down.zero_(), *of_biases, of_weights
    num_rows = rows.shape[0]
    layer = ExpertsLayer.of(
        rows, up, up_bias, counts.shape[0], (activation, clamp, alpha), weighted=weights is not None
    )
    work = layer.backward(num_rows, table, ways)
    _, parts, width, dim = up.shape
    grad_hidden, activated = torch.empty_like(hidden), rows.new_empty((num_rows, width))
    given, made = (grad, down, *work.order), (hidden, grad_hidden, activated)
    if weights is None:
        work.down.product("down_backward", width, *given, *made)
    else:
        num_parts = work.down.parts
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


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels of experts' products over `table`. `order`: its order, where kernels gather rows or choices."""

    up: Projection
    down: Projection
    table: Table
    order: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """A layer's experts on a device: what its kernels are rendered for, besides their tiles.

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
        known = (x.device, dtype_name(x), experts, dim, hidden, name, tuple(parameters), bias)
        return cls(*known, sources, k, weighted)

    def forward(self, num_rows: int, counts: Tensor, ways: str | None) -> Work:
        """Its kernels over a new table of these counts [sources, E]; its order is the caller's to fill with `k`."""
        found = self._ways(num_rows, ways)
        table = Table.empty(counts, num_rows, self.experts, found.rows)
        if num_rows:
            table.fill(counts)
        return self._work(found, table)

    def backward(self, num_rows: int, saved: Tensor, ways: str | None) -> Work:
        """Its kernels over the table that forward saved."""
        found = self._ways(num_rows, ways)
        return self._work(found, Table.of(saved, num_rows, self.experts, found.rows))

    def _ways(self, num_rows: int, ways: str | None) -> Ways:
        widths = (self.dim, self.hidden)
        return ways_at(ways, self.device, self.dtype, num_rows, self.experts, widths, self.activation)

    def _work(self, ways: Ways, table: Table) -> Work:
        gathered = self.sources > 1
        known = (self.experts, self.dim, self.hidden, self.activation, self.dtype, gathered, self.k, self.bias)
        numbers: dict[str, Any] = dict(zip(PARAMETERS, self.parameters, strict=True))
        up = UpShape.of(*known, ways, **numbers)
        down = DownShape.of(*known, ways, weighted=self.weighted, **numbers)
        of_up, of_down = (Projection(shape, kernels_of(shape, table.saved), table) for shape in (up, down))
        return Work(of_up, of_down, table, (table.order,) if gathered or self.k else ())


def _refuse_other_sum(counts: Tensor, num_rows: int) -> None:
    """Raises `RuntimeError`, only on CPU, without synchronisation; on devices the table stays within `num_rows`."""
    if counts.device.type == "cpu" and int(counts.sum()) != num_rows:
        message = f"moec::expert_mlp: the counts add up to {int(counts.sum())}, but there are {num_rows} rows"
        raise RuntimeError(message)

"""Rows in their places, and tokens' weighted sums of them, by rendered kernels: each row is written once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.codegen.kernels.kernel_shape import accumulator
from moec.codegen.kernels.row_shapes import PlacesShape
from moec.runtime.backends.torch import torch_rows
from moec.runtime.backends.torch.torch_rows import refuse_other_number, refuse_out_of_range
from moec.runtime.backends.triton.triton_launch import Kernels, dtype_name, kernels_of, too_many
from moec.runtime.backends.triton.triton_queues import Queues


def permute(x: Tensor, experts: Tensor, num_experts: int, some_are_none: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    if not x.dtype.is_floating_point or too_many(num_experts):
        return torch_rows.permute(x, experts, num_experts, some_are_none)
    refuse_out_of_range("permute", experts, num_experts, -1 if some_are_none else 0)
    queues = Queues.single(experts, num_experts)
    positions = queues.positions(experts.shape)
    num_rows = int(queues.totals.sum()) if some_are_none else experts.numel()
    rows = x.new_empty((num_rows, x.shape[2]))
    Places.of(x, positions).fill(x, rows)
    return rows, queues.totals.view(1, num_experts), positions


def permute_backward(grad: Tensor, positions: Tensor) -> Tensor:
    return Places.of(grad, positions).add_rows(grad)


def combine(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    refuse_other_number("combine", rows, positions)
    return Places.of(rows, positions, weights).combine(rows, weights)


def combine_backward(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return Places.of(rows, positions, weights).combine_backward(grad, rows, weights)


def sum_rows(rows: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
    refuse_other_number("sum_rows", rows, positions)
    return Places.of(rows, positions).add_rows(rows)


def sum_rows_backward(grad: Tensor, positions: Tensor, counts: Tensor, shape: Sequence[int]) -> Tensor:
    rows = grad.new_empty((*shape, grad.shape[2]))
    Places.of(grad, positions).fill(grad, rows, counts.contiguous() if rows.dim() == 3 else None)
    return rows


@dataclass(frozen=True, slots=True)
class Places:
    """The rows of each token: positions [B, S, k] int64, −1 for none, otherwise distinct."""

    kernels: Kernels
    positions: Tensor

    @classmethod
    def of(cls, x: Tensor, positions: Tensor, weights: Tensor | None = None) -> Places:
        """For rows or tokens [..., D]."""
        dtype, k = dtype_name(x), positions.shape[2]
        weights_dtype = accumulator(dtype) if weights is None else dtype_name(weights)
        shape = PlacesShape(k=k, dim=x.shape[-1], dtype=dtype, weights=weights_dtype)
        return cls(kernels_of(shape, x), positions.contiguous())

    def fill(self, x: Tensor, rows: Tensor, counts: Tensor | None = None) -> None:
        """Copies tokens x to their rows. With counts [1, E], rows are [E, places, D], zeros from counts[e] on."""
        num_rows, places = 0, 1
        if counts is not None:
            num_rows, places = rows.shape[0] * rows.shape[1], rows.shape[1]
        zeros = self.kernels.blocks(num_rows, "ROWS")[0]
        tensors = (x.contiguous(), self.positions, self.positions if counts is None else counts, rows)
        self.kernels.launch("fill", self._programs(rows, zeros), *tensors, self._tokens, num_rows, places)

    def add_rows(self, rows: Tensor) -> Tensor:
        """Each token's sum of its rows: [..., D] -> [B, S, D]."""
        out = self._new_sums(rows)
        self.kernels.launch("add_rows", self._programs(rows), rows.contiguous(), self.positions, out)
        return out

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Each token's weighted sum of its rows: [..., D], weights [B, S, k] -> [B, S, D]."""
        out = self._new_sums(rows)
        tensors = (rows.contiguous(), self.positions, weights.contiguous(), out)
        self.kernels.launch("combine", self._programs(rows), *tensors)
        return out

    def combine_backward(
        self, grad: Tensor, rows: Tensor, weights: Tensor, spare: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The gradients of rows and weights; `spare`: some rows belong to no token, and get zeros."""
        grad_rows, grad_weights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
        num_rows, is_row_used = 0, self.positions
        if spare:
            num_rows = rows.numel() // max(1, rows.shape[-1])
            is_row_used = torch.zeros(num_rows, dtype=torch.int8, device=rows.device)
            num_choices = self.positions.numel()
            self.kernels.launch("mark", self.kernels.blocks(num_choices), self.positions, is_row_used, num_choices)
        grid = (self._tokens + self.kernels.blocks(num_rows, "ROWS")[0],)
        tensors = (grad.contiguous(), rows.contiguous(), self.positions, weights.contiguous(), is_row_used)
        self.kernels.launch("combine_backward", grid, *tensors, grad_rows, grad_weights, self._tokens, num_rows)
        return grad_rows, grad_weights

    def fill_order(self, order: Tensor) -> None:
        """Writes the choice of each row to order [B·S·k] int32; undefined beyond the last row."""
        number = self.positions.numel()
        self.kernels.launch("invert", self.kernels.blocks(number), self.positions, order, number)

    def add_parts(self, parts: Tensor, grad_weights: Tensor) -> None:
        """Writes grad_weights [B, S, k]: for each choice, the sum of its row's parts [parts, R]."""
        number = self.positions.numel()
        tensors = (parts, self.positions, grad_weights)
        self.kernels.launch("add_parts", self.kernels.blocks(number), *tensors, number, *parts.shape)

    @property
    def _tokens(self) -> int:
        return self.positions.numel() // self.positions.shape[2]

    def _new_sums(self, rows: Tensor) -> Tensor:
        return rows.new_empty((*self.positions.shape[:2], rows.shape[-1]))

    def _programs(self, rows: Tensor, extra: int = 0) -> tuple[int, ...]:
        """The grid: one program for each block of columns of each token, and of `extra` other rows."""
        return self._tokens + extra, *self.kernels.blocks(rows.shape[-1], "BLOCK_D")

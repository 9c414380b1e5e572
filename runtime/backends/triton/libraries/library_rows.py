"""The passes around a library's products, by rendered kernels: they gather, activate and scatter rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.codegen.kernels.around_shape import AroundShape
from moec.runtime.backends.triton.triton_launch import Kernels, kernels_of, present


@dataclass(frozen=True, slots=True)
class Around:
    """The kernels around products of `num_rows` rows, in the order of the experts.

    offsets [E + 1] int32 of the experts' rows; order [R] int32 as in `Table`, read only where rows are gathered.
    """

    shape: AroundShape
    num_rows: int
    offsets: Tensor
    order: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """The rows [R, D] of tokens or unordered rows x [..., D]; x itself if it is in the experts' order."""
        if not self._is_moved:
            return x
        rows = x.new_empty((self.num_rows, self.shape.dim))
        self._launch("gather", "BLOCK_D", x, self.order, rows)
        return rows

    def activate(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """activated [R, F] of hidden [R, G, F], to which the bias [E, G, F] is added in place."""
        activated = hidden.new_empty((self.num_rows, self.shape.hidden))
        self._launch("activate", "BLOCK_F", *present(bias), hidden, activated)
        return activated

    def place(self, rows: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
        """The output [R, D]: rows plus the bias [E, D], weighted, in arrival order. May overwrite `rows`."""
        order = self._order if self.shape.gathered else ()
        if bias is None and weights is None and not order:
            return rows
        out = torch.empty_like(rows) if order else rows
        self._launch("place", "BLOCK_D", rows, *present(bias), *order, *present(weights), out)
        return out

    def scatter(self, rows: Tensor) -> Tensor:
        """Rows [R, D] in arrival order."""
        if not self.shape.gathered:
            return rows
        out = torch.empty_like(rows)
        self._launch("scatter", "BLOCK_D", rows, self.order, out)
        return out

    def through(
        self, grad: Tensor, grad_activated: Tensor, hidden: Tensor, bias: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """From grad_activated [R, F]: grad_hidden [R, G, F], activated [R, F], and the weights' gradients [1, R].

        grad [R, D] are the output's gradients in the experts' order. `activated` takes the memory of grad_activated.
        """
        grad_hidden, parts = torch.empty_like(hidden), None
        inputs: tuple[Tensor, ...] = ()
        if weights is not None:
            parts = hidden.new_empty((1, self.num_rows), dtype=torch.promote_types(hidden.dtype, torch.float32))
            bias_inputs = () if bias is None else (grad, bias.contiguous())
            inputs = (*bias_inputs, *self._order, *present(weights), parts)
        results = (grad_activated, hidden, grad_hidden, grad_activated, self.offsets)
        self._kernels.launch("through", self._kernels.blocks(self.num_rows, "ROWS"), *inputs, *results)
        return grad_hidden, grad_activated, parts

    @property
    def _is_moved(self) -> bool:
        return self.shape.gathered or self.shape.k > 0

    @property
    def _order(self) -> tuple[Tensor, ...]:
        return (self.order,) if self._is_moved else ()

    def _launch(self, kernel: str, block: str, *arguments: Any) -> None:
        width = self.shape.hidden if block == "BLOCK_F" else self.shape.dim
        grid = (*self._kernels.blocks(self.num_rows, "ROWS"), *self._kernels.blocks(width, block))
        self._kernels.launch(kernel, grid, *arguments, self.offsets)

    @property
    def _kernels(self) -> Kernels:
        return kernels_of(self.shape, self.offsets)

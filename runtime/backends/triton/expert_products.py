"""The six products of a layer's experts, each in its own way: by a rendered kernel, or by a library.

Whatever computes a product, its operands and results lie in the same order, so that forward and backward, and both
projections, may differ in their ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moec.codegen.kernels.tiles import Tile, Ways
from moec.runtime.backends.triton.libraries.library_products import LibraryProducts, Source
from moec.runtime.backends.triton.product_clock import run_product
from moec.runtime.backends.triton.triton_launch import present
from moec.runtime.backends.triton.triton_projection import Projection
from moec.runtime.backends.triton.triton_table import Table


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """A layer's products over `table`. `order`: the table's, where kernels gather rows or choices.

    up [E, G, F, D] and down [E, D, F] are the weights; results with one row for each row R lie in the experts' order
    unless they say otherwise.
    """

    ways: Ways
    of_up: Projection
    of_down: Projection
    library: LibraryProducts
    table: Table
    order: tuple[Tensor, ...]

    def source(self, given: Tensor) -> Source:
        """Tokens [..., D], or rows [R, D] as they lie, which products read."""
        return Source(given, self.library.around)

    def up(self, x: Source, up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden [R, G, F], which backward needs, and activated [R, F]."""
        way = self.ways.up
        if not isinstance(way, Tile):
            return run_product("up", lambda: self.library.up(way, x, up, bias), x)
        (parts, width), rows = up.shape[1:3], self.table.num_rows
        hidden, activated = up.new_empty((rows, parts, width)), up.new_empty((rows, width))
        self.of_up.product("up", width, x.given, *self.order, up, *present(bias), hidden, activated)
        return hidden, activated

    def down(self, activated: Tensor, down: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
        """out [R, D], where rows lie; weights are those of rows [R]."""
        way = self.ways.down
        if not isinstance(way, Tile):
            return run_product("down", lambda: self.library.down(way, activated, down, bias, weights))
        out = down.new_empty((self.table.num_rows, down.shape[1]))
        order = self.order if self.of_down.shape.gathered else ()
        self.of_down.product("down", down.shape[1], activated, down, *present(bias), *order, *present(weights), out)
        return out

    def down_backward(
        self, grad: Source, hidden: Tensor, down: Tensor, bias: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """grad_hidden [R, G, F] and activated [R, F], both weighted, and parts [n, R] of the weights' gradients.

        weights are those of rows [R] or of choices; None, and no parts, where there are none.
        """
        way = self.ways.down_backward
        if not isinstance(way, Tile):
            return run_product(
                "down_backward", lambda: self.library.down_backward(way, grad, hidden, down, bias, weights), grad
            )
        rows, width = self.table.num_rows, down.shape[2]
        grad_hidden, activated = torch.empty_like(hidden), hidden.new_empty((rows, width))
        made = (hidden, grad_hidden, activated)
        if weights is None:
            self.of_down.product("down_backward", width, grad.given, down, *self.order, *made)
            return grad_hidden, activated, None
        parts = hidden.new_empty((self.of_down.parts, rows), dtype=torch.promote_types(hidden.dtype, torch.float32))
        given = (grad.given, down, *present(bias), *self.order, weights.contiguous(), parts)
        self.of_down.product("down_backward", width, *given, *made, more=(rows,))
        return grad_hidden, activated, parts

    def down_weights(self, grad: Source, activated: Tensor, down: Tensor) -> Tensor:
        """The gradient of down."""
        way = self.ways.down_weights
        if not isinstance(way, Tile):
            return run_product("down_weights", lambda: self.library.down_weights(way, grad, activated), grad)
        gradient = torch.empty_like(down)
        self.of_down.weights("down_weights", down.shape[1:], grad.given, activated, *self.order, gradient)
        return gradient

    def up_backward(self, grad_hidden: Tensor, up: Tensor) -> Tensor:
        """grad_rows [R, D], where rows lie."""
        way = self.ways.up_backward
        if not isinstance(way, Tile):
            return run_product("up_backward", lambda: self.library.up_backward(way, grad_hidden, up))
        grad_rows, dim = up.new_empty((self.table.num_rows, up.shape[3])), up.shape[3]
        order = self.order if self.of_up.shape.gathered else ()
        self.of_up.product("up_backward", dim, grad_hidden, up, *order, grad_rows)
        return grad_rows

    def up_weights(self, grad_hidden: Tensor, x: Source, up: Tensor) -> Tensor:
        """The gradient of up."""
        way = self.ways.up_weights
        if not isinstance(way, Tile):
            return run_product("up_weights", lambda: self.library.up_weights(way, grad_hidden, x, up), x)
        gradient, shape = torch.empty_like(up), up.flatten(1, 2).shape[1:]
        self.of_up.weights("up_weights", shape, grad_hidden, x.given, *self.order, gradient)
        return gradient

    def biases(self, grad_hidden: Tensor, grad: Tensor, weights: Tensor | None, of_up: Tensor, of_down: Tensor) -> None:
        """Writes the gradients of both biases; grad [..., D] as it is given, weights as in `down_backward`."""
        self.of_up.bias("up_bias", of_up[0].numel(), grad_hidden, of_up)
        self.of_down.bias("down_bias", of_down.shape[1], grad, *self.order, *present(weights), of_down)

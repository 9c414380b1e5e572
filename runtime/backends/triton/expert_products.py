"""The six products of a layer's experts, each by a rendered kernel or by a library.

Kernels and libraries use the same order of operands and results, so that each product may choose its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.codegen.kernels.tiles import Tile, Ways
from moec.runtime.backends.torch.torch_experts import Gradients, new_biases
from moec.runtime.backends.triton.libraries.library_products import LibraryProducts, Source
from moec.runtime.backends.triton.product_clock import run_product
from moec.runtime.backends.triton.triton_launch import present
from moec.runtime.backends.triton.triton_projection import Projection
from moec.runtime.backends.triton.triton_table import Table


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """A layer's products over `table`. `order`: the table's, where kernels gather rows or choices; else empty.

    up [E, G, F, D] and down [E, D, F] are the weights. Results [R, …] are in the experts' order, or in arrival order:
    the order in which rows came from several sources, which for one source and for choices is the experts' order.
    """

    ways: Ways
    up_projection: Projection
    down_projection: Projection
    library: LibraryProducts
    table: Table
    order: tuple[Tensor, ...]

    def source(self, tensor: Tensor) -> Source:
        """Tokens [..., D], or rows [R, D] in arrival order, as operands of products."""
        return Source(tensor, self.library.around)

    def up(self, x: Source, up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden [R, G, F], which backward needs, and activated [R, F]."""
        way = self.ways.up
        if not isinstance(way, Tile):
            return run_product("up", lambda: self.library.up(way, x, up, bias), x)
        (parts, width), rows = up.shape[1:3], self.table.num_rows
        hidden, activated = up.new_empty((rows, parts, width)), up.new_empty((rows, width))
        self.up_projection.product("up", width, x.tensor, *self.order, up, *present(bias), hidden, activated)
        return hidden, activated

    def down(self, activated: Tensor, down: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
        """out [R, D], in arrival order; weights are those of rows [R]."""
        way = self.ways.down
        if not isinstance(way, Tile):
            return run_product("down", lambda: self.library.down(way, activated, down, bias, weights))
        out = down.new_empty((self.table.num_rows, down.shape[1]))
        order = self.order if self.down_projection.shape.gathered else ()
        inputs = (activated, down, *present(bias), *order, *present(weights))
        self.down_projection.product("down", down.shape[1], *inputs, out)
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
        results = (hidden, grad_hidden, activated)
        if weights is None:
            self.down_projection.product("down_backward", width, grad.tensor, down, *self.order, *results)
            return grad_hidden, activated, None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        parts = hidden.new_empty((self.down_projection.parts, rows), dtype=dtype)
        inputs = (grad.tensor, down, *present(bias), *self.order, weights.contiguous(), parts)
        self.down_projection.product("down_backward", width, *inputs, *results, numbers=(rows,))
        return grad_hidden, activated, parts

    def down_weights(self, grad: Source, activated: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of down, which has this shape."""
        way = self.ways.down_weights
        if not isinstance(way, Tile):
            return run_product("down_weights", lambda: self.library.down_weights(way, grad, activated), grad)
        gradient = activated.new_empty(shape)
        self.down_projection.weights("down_weights", shape[1:], grad.tensor, activated, *self.order, gradient)
        return gradient

    def up_backward(self, grad_hidden: Tensor, up: Tensor) -> Tensor:
        """grad_rows [R, D], in arrival order."""
        way = self.ways.up_backward
        if not isinstance(way, Tile):
            return run_product("up_backward", lambda: self.library.up_backward(way, grad_hidden, up))
        grad_rows, dim = up.new_empty((self.table.num_rows, up.shape[3])), up.shape[3]
        order = self.order if self.up_projection.shape.gathered else ()
        self.up_projection.product("up_backward", dim, grad_hidden, up, *order, grad_rows)
        return grad_rows

    def up_weights(self, grad_hidden: Tensor, x: Source, shape: torch.Size) -> Tensor:
        """The gradient of up, which has this shape."""
        way = self.ways.up_weights
        if not isinstance(way, Tile):
            return run_product("up_weights", lambda: self.library.up_weights(way, grad_hidden, x, shape), x)
        gradient, widths = grad_hidden.new_empty(shape), (shape[1] * shape[2], shape[3])
        self.up_projection.weights("up_weights", widths, grad_hidden, x.tensor, *self.order, gradient)
        return gradient

    def biases(
        self, grad_hidden: Tensor, grad: Tensor, weights: Tensor | None, grad_up: Tensor, grad_down: Tensor
    ) -> None:
        """Writes the biases' gradients grad_up and grad_down; grad [..., D] unordered."""
        self.up_projection.bias("up_bias", grad_up[0].numel(), grad_hidden, grad_up)
        self.down_projection.bias("down_bias", grad_down.shape[1], grad, *self.order, *present(weights), grad_down)

    def of_weights(
        self,
        grad: Tensor,
        x: Tensor,
        grad_hidden: Tensor,
        activated: Tensor,
        weights: Tensor | None,
        shapes: Sequence[torch.Size],
    ) -> Gradients:
        """The gradients of up, down and biases, which have these shapes, of what `down_backward` gave."""
        up, down, *biases = shapes
        grad_biases = new_biases(x, biases)
        grad_down = self.down_weights(self.source(grad), activated, down)
        grad_up = self.up_weights(grad_hidden, self.source(x), up)
        if grad_biases[0].numel():
            self.biases(grad_hidden, grad, weights, *grad_biases)
        return grad_up, grad_down, *grad_biases

"""The six products of a layer's experts by libraries, each with the passes around it that our kernels fuse.

Rows are in the experts' order. A library rounds its result before the passes read it: in 16 bits, `hidden` with a bias
and the gradient of `activated` are rounded once more than by our kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moec.codegen.kernels.tiles import Library
from moec.runtime.backends.triton.libraries.library_choice import MODULES
from moec.runtime.backends.triton.libraries.library_rows import Around


class Source:
    """An operand of products: `tensor`, unordered, and its `rows` in the experts' order, copied at their first use."""

    def __init__(self, tensor: Tensor, around: Around) -> None:
        self.tensor = tensor
        self._around = around

    @cached_property
    def rows(self) -> Tensor:
        """[R, D], in the experts' order."""
        return self._around.gather(self.tensor)

    def drop_copy(self) -> None:
        """Drops the copy of the rows."""
        self.__dict__.pop("rows", None)


@dataclass(frozen=True, slots=True)
class LibraryProducts:
    """Products by a library; `up` and `down` are the weights [E, G, F, D] and [E, D, F]."""

    around: Around

    def up(self, library: Library, x: Source, up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden [R, G, F], which backward needs, and activated [R, F]."""
        flat = MODULES[library].times_transposed(x.rows, up.flatten(1, 2), self._offsets)
        hidden = flat.view(-1, *up.shape[1:3])
        return hidden, self.around.activate(hidden, bias)

    def down(
        self, library: Library, activated: Tensor, down: Tensor, bias: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """out [R, D], in arrival order; weights only of rows [R]."""
        return self.around.place(MODULES[library].times_transposed(activated, down, self._offsets), bias, weights)

    def down_backward(
        self,
        library: Library,
        grad: Source,
        hidden: Tensor,
        down: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """grad_hidden [R, G, F], activated [R, F], both weighted, and the gradients of the weights [1, R]."""
        grad_activated = MODULES[library].times(grad.rows, down, self._offsets)
        return self.around.through(grad.rows, grad_activated, hidden, bias, weights)

    def down_weights(self, library: Library, grad: Source, activated: Tensor) -> Tensor:
        """The gradient [E, D, F] of down."""
        gradient: Tensor = MODULES[library].transposed_times(grad.rows, activated, self._offsets)
        return gradient

    def up_backward(self, library: Library, grad_hidden: Tensor, up: Tensor) -> Tensor:
        """grad_rows [R, D], in arrival order."""
        rows = MODULES[library].times(grad_hidden.flatten(1), up.flatten(1, 2), self._offsets)
        return self.around.scatter(rows)

    def up_weights(self, library: Library, grad_hidden: Tensor, x: Source, shape: torch.Size) -> Tensor:
        """The gradient of up, which has this shape."""
        gradient: Tensor = MODULES[library].transposed_times(grad_hidden.flatten(1), x.rows, self._offsets)
        return gradient.view(shape)

    @property
    def _offsets(self) -> Tensor:
        return self.around.offsets

"""Experts' feed-forwards in plain torch: one matrix product per expert, into slices of preallocated results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir.row_table import table_length
from moec.runtime.backends.torch.torch_activations import activate, activate_backward
from moec.runtime.backends.torch.torch_bounded import Weigh
from moec.runtime.backends.torch.torch_memory import new_empty
from moec.runtime.backends.torch.torch_row_groups import RowGroup, longest, row_groups
from moec.runtime.backends.torch.torch_threads import each_expert

Shapes = tuple[torch.Size, ...]
"""Those of up, down and both biases, [0] for a bias that there is not."""
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Those of up, down and both biases."""


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
    rows, up, down = rows.contiguous(), up.flatten(1, 2), down.contiguous()
    width = down.shape[2]
    groups = row_groups(counts, rows.shape[0])
    hidden = new_empty(rows, (rows.shape[0], up.shape[1] // width, width))
    out = new_empty(rows, rows.shape)

    def begin() -> Callable[[int], None]:
        activated = rows.new_empty((longest(groups), width))

        def compute(expert: int) -> None:
            group = groups[expert]
            if group.size:
                expert_hidden, expert_activated = hidden[group.span], activated[: group.size]
                project(group.gather(rows), up, up_bias, expert, expert_hidden.flatten(1))
                activate(expert_activated, expert_hidden, activation, clamp, alpha)
                expert_out = group.buffer_for(out)
                project(expert_activated, down, down_bias, expert, expert_out)
                if weights is not None:
                    expert_out.mul_(group.scale(weights, rows.dtype))
                group.scatter(expert_out, out)

        return compute

    each_expert([group.size for group in groups], 3 * rows.shape[1] * width, rows.device, begin)
    return out, hidden, unused_table(rows.shape[0], counts[0])


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
    parameters = (up, down, up_bias, down_bias)
    inputs = _Inputs.of(grad, rows, hidden, counts, up, down, down_bias, weights, (activation, clamp, alpha))
    products = inputs.products(rows, *parameters)
    gradients, size, shape = products.new_gradients(), longest(inputs.groups), hidden.shape[1:]

    def begin() -> Callable[[int], None]:
        # Buffers for one expert, reused by the next, so that they stay in cache.
        buffers = rows.new_empty((size, *shape)), *rows.new_empty((2, size, shape[1]))

        def compute(expert: int) -> None:
            group = inputs.groups[expert]
            if not group.size:
                without_rows(expert, gradients)
                return
            expert_grad = group.gather(inputs.grad)
            grad_hidden, activated, grad_activated = (buffer[: group.size] for buffer in buffers)
            inputs.compute(expert, expert_grad, grad_hidden, activated, grad_activated)
            products.compute(expert, expert_grad, grad_hidden, activated, gradients)

        return compute

    inputs.each_expert(3, begin)
    return inputs.grad_rows, *gradients, inputs.grad_weights


def expert_mlp_backward_split(
    grad: Tensor, rows: Tensor, hidden: Tensor, table: Tensor, counts: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Callable[[], Gradients]]:
    up, down, up_bias, down_bias, weights, activation, clamp, alpha, _ = operands
    inputs = _Inputs.of(grad, rows, hidden, counts, up, down, down_bias, weights, (activation, clamp, alpha))
    grad_hidden, activated = new_empty(rows, hidden.shape), new_empty(rows, (rows.shape[0], hidden.shape[2]))

    def begin() -> Callable[[int], None]:
        grad_activated = rows.new_empty((longest(inputs.groups), hidden.shape[2]))

        def compute(expert: int) -> None:
            group = inputs.groups[expert]
            if group.size:
                results = grad_hidden[group.span], activated[group.span], grad_activated[: group.size]
                inputs.compute(expert, group.gather(inputs.grad), *results)

        return compute

    inputs.each_expert(2, begin)
    products = inputs.products(rows, up, down, up_bias, down_bias)
    return inputs.grad_rows, inputs.grad_weights, partial(products.run, inputs.grad, grad_hidden, activated)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The gradients of rows and of their weights. `up` is [E, G · F, D]."""

    grad: Tensor
    hidden: Tensor
    up: Tensor
    down: Tensor
    down_bias: Tensor | None
    weights: Tensor | None
    activation: tuple[Any, ...]
    groups: list[RowGroup]
    grad_rows: Tensor
    grad_weights: Tensor

    @classmethod
    def of(
        cls,
        grad: Tensor,
        rows: Tensor,
        hidden: Tensor,
        counts: Tensor,
        up: Tensor,
        down: Tensor,
        down_bias: Tensor | None,
        weights: Tensor | None,
        activation: tuple[Any, ...],
    ) -> _Inputs:
        """With new, uninitialised results."""
        grad_weights = rows.new_empty(0) if weights is None else weights.new_empty(weights.shape)
        return cls(
            grad.contiguous(),
            hidden,
            up.flatten(1, 2),
            down.contiguous(),
            down_bias,
            weights,
            activation,
            row_groups(counts, rows.shape[0]),
            new_empty(rows, rows.shape),
            grad_weights,
        )

    def compute(
        self, expert: int, expert_grad: Tensor, grad_hidden: Tensor, activated: Tensor, grad_activated: Tensor
    ) -> None:
        """Also writes grad_hidden [N, G, F] and activated [N, F] of the expert's rows, both times their weights;
        grad_activated is a buffer."""
        group, weigh = self.groups[expert], None
        torch.mm(expert_grad, self.down[expert], out=grad_activated)
        if self.weights is not None:
            scale, grad_weights = group.scale(self.weights, expert_grad.dtype), group.buffer_for(self.grad_weights)
            weigh = weighing(grad_activated, activated, scale, grad_weights)
        activate_backward(
            grad_hidden, activated, grad_activated, self.hidden[group.span], *self.activation, weigh=weigh
        )
        if self.weights is not None:
            if self.down_bias is not None:
                grad_weights += (expert_grad * self.down_bias[expert]).sum(-1, dtype=self.weights.dtype)
            group.scatter(grad_weights, self.grad_weights)
            activated.mul_(scale)
        grad_rows = group.buffer_for(self.grad_rows)
        torch.mm(grad_hidden.flatten(1), self.up[expert], out=grad_rows)
        group.scatter(grad_rows, self.grad_rows)

    def each_expert(self, products: int, begin: Callable[[], Callable[[int], None]]) -> None:
        """`each_expert`, for so many products of an expert's rows and a matrix like down."""
        each_expert([group.size for group in self.groups], products * self.down[0].numel(), self.grad.device, begin)

    def products(self, rows: Tensor, *parameters: Tensor | None) -> _Products:
        """The products of these rows."""
        return _Products(rows.contiguous(), self.weights, self.groups, shapes_of(parameters))


@dataclass(frozen=True, slots=True)
class _Products:
    """The gradients of the parameters of these `shapes`. Keeps none of the parameters, which may be gathered."""

    rows: Tensor
    weights: Tensor | None
    groups: list[RowGroup]
    shapes: Shapes

    def new_gradients(self) -> Gradients:
        """Uninitialised ones."""
        return new_gradients(self.rows, self.shapes)

    def compute(
        self, expert: int, expert_grad: Tensor, grad_hidden: Tensor, activated: Tensor, gradients: Gradients
    ) -> None:
        """Those of an expert with rows, of what `_Inputs.compute` has written."""
        grad_up, grad_down, grad_up_bias, grad_down_bias = gradients
        torch.mm(expert_grad.t(), activated, out=grad_down[expert])
        expert_rows = self.groups[expert].gather(self.rows)
        torch.mm(grad_hidden.flatten(1).t(), expert_rows, out=grad_up[expert].flatten(0, 1))
        if grad_up_bias.numel():
            sum_rows(grad_hidden, grad_up_bias[expert])
            if self.weights is not None:
                expert_grad = expert_grad * self.groups[expert].scale(self.weights, expert_grad.dtype)
            sum_rows(expert_grad, grad_down_bias[expert])

    def run(self, grad: Tensor, grad_hidden: Tensor, activated: Tensor) -> Gradients:
        """Those of all experts, of the rows in their order."""
        gradients = self.new_gradients()

        def compute(expert: int) -> None:
            group = self.groups[expert]
            if group.size:
                rows = grad_hidden[group.span], activated[group.span]
                self.compute(expert, group.gather(grad), *rows, gradients)
            else:
                without_rows(expert, gradients)

        numbers = 2 * activated.shape[1] * grad.shape[1]
        each_expert([group.size for group in self.groups], numbers, grad.device, lambda: compute)
        return gradients


def project(rows: Tensor, weights: Tensor, biases: Tensor | None, expert: int, out: Tensor) -> None:
    """out [N, O], of rows [N, I], weights [E, O, I], and biases, E times O numbers."""
    if biases is None:
        torch.mm(rows, weights[expert].t(), out=out)
    else:
        torch.addmm(biases[expert].flatten(), rows, weights[expert].t(), out=out)


def unused_table(num_rows: int, counts: Tensor) -> Tensor:
    """The table of rows that operators return, zero: plain torch orders rows in backward by other results."""
    return counts.new_zeros(table_length(num_rows, counts.shape[0]), dtype=torch.int32)


def shapes_of(parameters: Iterable[Tensor | None]) -> Shapes:
    return tuple(torch.Size([0]) if parameter is None else parameter.shape for parameter in parameters)


def new_gradients(like: Tensor, shapes: Shapes) -> Gradients:
    """Uninitialised gradients of both weights, and `new_biases`."""
    up, down, *biases = shapes
    return new_empty(like, up), new_empty(like, down), *new_biases(like, biases)


def new_biases(like: Tensor, shapes: Iterable[torch.Size]) -> tuple[Tensor, Tensor]:
    """Zeros for the biases' gradients; of shape [0] where there is no bias."""
    grad_up_bias, grad_down_bias = (like.new_zeros(shape) for shape in shapes)
    return grad_up_bias, grad_down_bias


def without_rows(expert: int, gradients: Gradients) -> None:
    """Zeros for an expert that got no rows; its biases' gradients are zeros already."""
    for gradient in gradients[:2]:
        gradient[expert].zero_()


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """The sum of rows [N, …] into out […], added up in at least float32."""
    out.copy_(rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)))


def weighing(grad: Tensor, activated: Tensor, scale: Tensor, grad_weights: Tensor) -> Weigh:
    """Makes a `Weigh`: writes the weights' gradient [N], sum(grad · activated), then scales grad [N, F] by them."""

    def weigh(block: slice, buffer: Tensor) -> None:
        torch.mul(grad[block], activated[block], out=buffer)
        grad_weights[block] = buffer.sum(dim=-1, dtype=grad_weights.dtype)
        grad[block].mul_(scale[block])

    return weigh

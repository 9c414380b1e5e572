"""A local mixture in plain torch: experts gather their tokens, so that no copy of a token per choice is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_activations import activate, activate_backward
from moec.runtime.backends.torch.torch_batches import Batch, batches_of, largest
from moec.runtime.backends.torch.torch_experts import (
    Gradients,
    Shapes,
    new_gradients,
    project,
    shapes_of,
    sum_rows,
    unused_table,
    weighing,
)
from moec.runtime.backends.torch.torch_memory import new_empty
from moec.runtime.backends.torch.torch_rows import (
    choices_of_rows,
    inverse,
    refuse_out_of_range,
    stable_order,
    token_sums,
)
from moec.runtime.backends.torch.torch_threads import each_expert


def mixture_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_experts, k, (dim, width) = up.shape[0], experts.shape[2], down.shape[1:]
    refuse_out_of_range("mixture_mlp", experts, num_experts, -1)
    choices = experts.reshape(-1)
    buckets = torch.bincount(choices + 1, minlength=num_experts + 1)
    dropped, *sizes = buckets.tolist()
    # Dropped choices sort after all others; then their positions become −1.
    order = stable_order(choices.where(choices >= 0, num_experts) if dropped else choices, num_experts + 1)
    chosen = inverse(order)
    num_rows = choices.numel() - dropped

    tokens, up, down = order.div(k, rounding_mode="floor"), up.flatten(1, 2), down.contiguous()
    flat, factor = x.reshape(-1, dim), up.shape[1] // width
    hidden, out = new_empty(x, (choices.numel(), factor, width)), new_empty(x, (num_rows, dim))
    hidden[num_rows:] = 0
    batches = batches_of(sizes, width)

    def begin() -> Callable[[int], None]:
        rows, activated_buffer = x.new_empty((largest(batches), dim)), x.new_empty((largest(batches), width))

        def compute(number: int) -> None:
            batch = batches[number]
            batch_rows = torch.index_select(flat, 0, tokens[batch.rows], out=rows[: batch.size])
            batch_hidden, activated, batch_out = hidden[batch.rows], activated_buffer[: batch.size], out[batch.rows]
            projected = batch_hidden.flatten(1)
            for expert, expert_rows in batch.experts():
                project(batch_rows[expert_rows], up, up_bias, expert, projected[expert_rows])
            activate(activated, batch_hidden, activation, clamp, alpha)
            for expert, expert_rows in batch.experts():
                project(activated[expert_rows], down, down_bias, expert, batch_out[expert_rows])

        return compute

    each_expert([batch.cost for batch in batches], 3 * dim * width, x.device, begin)
    positions = (chosen.where(chosen < num_rows, -1) if dropped else chosen).view(experts.shape)
    mixed = token_sums(out, positions, weights, dropped > 0)
    return mixed, buckets[None, 1:].clone(), hidden, positions, unused_table(choices.numel(), buckets[1:])


def mixture_mlp_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    table: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    parameters = (up, down, up_bias, down_bias)
    activates = (activation, clamp, alpha)
    inputs = _Inputs.of(grad, x, hidden, counts, positions, weights, up, down, down_bias, activates)
    products = inputs.products(x, *parameters)
    gradients, size, shape = products.new_gradients(), largest(inputs.batches), hidden.shape[1:]

    def begin() -> Callable[[int], None]:
        # Buffers for one batch, reused by the next, so that they stay in cache.
        buffers = x.new_empty((size, *shape)), *x.new_empty((2, size, shape[1])), x.new_empty((size, x.shape[2]))
        compute_products = products.begin(gradients)

        def compute(number: int) -> None:
            batch = inputs.batches[number]
            grad_hidden, activated, grad_activated, batch_grad = (buffer[: batch.size] for buffer in buffers)
            inputs.compute(batch, grad_hidden, activated, grad_activated, batch_grad)
            compute_products(batch, grad_hidden, activated, batch_grad)

        return compute

    inputs.each_batch(3, begin)
    return *inputs.results(), *gradients


def mixture_mlp_backward_split(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    table: Tensor,
    weights: Tensor,
    *operands: Any,
) -> tuple[Tensor, Tensor, Callable[[], Gradients]]:
    up, down, up_bias, down_bias, activation, clamp, alpha, _ = operands
    activates = (activation, clamp, alpha)
    inputs = _Inputs.of(grad, x, hidden, counts, positions, weights, up, down, down_bias, activates)
    rows, width = inputs.grad_rows.shape[0], hidden.shape[2]
    grad_hidden, activated = new_empty(x, (rows, *hidden.shape[1:])), new_empty(x, (rows, width))

    def begin() -> Callable[[int], None]:
        buffers = x.new_empty((largest(inputs.batches), width)), x.new_empty((largest(inputs.batches), x.shape[2]))

        def compute(number: int) -> None:
            batch = inputs.batches[number]
            grad_activated, batch_grad = (buffer[: batch.size] for buffer in buffers)
            inputs.compute(batch, grad_hidden[batch.rows], activated[batch.rows], grad_activated, batch_grad)

        return compute

    inputs.each_batch(2, begin)
    products = inputs.products(x, up, down, up_bias, down_bias)
    return *inputs.results(), partial(products.run, inputs.grad, grad_hidden, activated)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The gradients of x and of the choices' weights. `up` is [E, G · F, D]; rows are those of choices."""

    grad: Tensor
    hidden: Tensor
    positions: Tensor
    up: Tensor
    down: Tensor
    down_bias: Tensor | None
    activation: tuple[Any, ...]
    batches: list[Batch]
    tokens: Tensor
    scale: Tensor
    grad_rows: Tensor
    grad_weights: Tensor

    @classmethod
    def of(
        cls,
        grad: Tensor,
        x: Tensor,
        hidden: Tensor,
        counts: Tensor,
        positions: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        down_bias: Tensor | None,
        activation: tuple[Any, ...],
    ) -> _Inputs:
        """With new results: rows uninitialised, weights zeros."""
        dim, width = down.shape[1:]
        sizes: list[int] = counts[0].tolist()
        tokens, scale = _tokens_of_rows(positions, weights, sum(sizes), x.dtype)
        return cls(
            grad.reshape(-1, dim),
            hidden,
            positions,
            up.flatten(1, 2),
            down,
            down_bias,
            activation,
            batches_of(sizes, width),
            tokens,
            scale,
            new_empty(x, (sum(sizes), dim)),
            weights.new_zeros(sum(sizes) + 1),
        )

    def compute(
        self, batch: Batch, grad_hidden: Tensor, activated: Tensor, grad_activated: Tensor, batch_grad: Tensor
    ) -> None:
        """Also writes grad_hidden [N, G, F], weighted, activated [N, F], and the batch's rows of grad [N, D];
        grad_activated is a buffer."""
        torch.index_select(self.grad, 0, self.tokens[batch.rows], out=batch_grad)
        for expert, rows in batch.experts():
            torch.mm(batch_grad[rows], self.down[expert], out=grad_activated[rows])
        grad_weights = self.grad_weights[batch.rows]
        weigh = weighing(grad_activated, activated, self.scale[batch.rows], grad_weights)
        hidden = self.hidden[batch.rows]
        activate_backward(grad_hidden, activated, grad_activated, hidden, *self.activation, weigh=weigh)
        grad_rows = self.grad_rows[batch.rows]
        for expert, rows in batch.experts():
            if self.down_bias is not None:
                products = torch.mul(batch_grad[rows], self.down_bias[expert], out=grad_rows[rows])
                grad_weights[rows].add_(products.sum(-1, dtype=grad_weights.dtype))
            torch.mm(grad_hidden[rows].flatten(1), self.up[expert], out=grad_rows[rows])

    def results(self) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the weights; dropped choices, −1, read the 0 at the last index."""
        grad_x = token_sums(self.grad_rows, self.positions, None, len(self.grad_rows) < self.positions.numel())
        return grad_x, self.grad_weights[self.positions]

    def each_batch(self, products: int, begin: Callable[[], Callable[[int], None]]) -> None:
        """`each_expert` over the batches, for so many products of an expert's rows and a matrix like down."""
        numbers = products * self.down.shape[1] * self.down.shape[2]
        each_expert([batch.cost for batch in self.batches], numbers, self.grad.device, begin)

    def products(self, x: Tensor, *parameters: Tensor | None) -> _Products:
        """The products of these rows."""
        return _Products(x.reshape(-1, x.shape[2]), self.tokens, self.scale, self.batches, shapes_of(parameters))


@dataclass(frozen=True, slots=True)
class _Products:
    """The gradients of the parameters of these `shapes`. Keeps none of the parameters, which may be gathered."""

    x: Tensor
    tokens: Tensor
    scale: Tensor
    batches: list[Batch]
    shapes: Shapes

    def new_gradients(self) -> Gradients:
        """Uninitialised ones."""
        return new_gradients(self.x, self.shapes)

    def begin(self, gradients: Gradients) -> Callable[[Batch, Tensor, Tensor, Tensor], None]:
        """A function of a batch and what `_Inputs.compute` has written of it."""
        grad_up, grad_down, grad_up_bias, grad_down_bias = gradients
        flat_grad_up, buffer = grad_up.flatten(1, 2), self.x.new_empty((largest(self.batches), self.x.shape[1]))

        def compute(batch: Batch, grad_hidden: Tensor, activated: Tensor, batch_grad: Tensor) -> None:
            batch_grad.mul_(self.scale[batch.rows])
            batch_rows = torch.index_select(self.x, 0, self.tokens[batch.rows], out=buffer[: batch.size])
            for expert, rows in batch.experts():
                torch.mm(batch_grad[rows].t(), activated[rows], out=grad_down[expert])
                torch.mm(grad_hidden[rows].flatten(1).t(), batch_rows[rows], out=flat_grad_up[expert])
                if grad_up_bias.numel():
                    sum_rows(grad_hidden[rows], grad_up_bias[expert])
                    sum_rows(batch_grad[rows], grad_down_bias[expert])

        return compute

    def run(self, grad: Tensor, grad_hidden: Tensor, activated: Tensor) -> Gradients:
        """Those of all experts; grad [tokens, D]."""
        gradients = self.new_gradients()

        def begin() -> Callable[[int], None]:
            buffer, compute_products = grad.new_empty((largest(self.batches), grad.shape[1])), self.begin(gradients)

            def compute(number: int) -> None:
                batch = self.batches[number]
                batch_grad = torch.index_select(grad, 0, self.tokens[batch.rows], out=buffer[: batch.size])
                compute_products(batch, grad_hidden[batch.rows], activated[batch.rows], batch_grad)

            return compute

        numbers = 2 * activated.shape[1] * grad.shape[1]
        each_expert([batch.cost for batch in self.batches], numbers, grad.device, begin)
        return gradients


def _tokens_of_rows(positions: Tensor, weights: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's token [R] and weight [R, 1], from the row and the weight of each choice, both [B, S, k]."""
    order = choices_of_rows(positions.reshape(-1), num_rows)
    # Rounded as in forward; also, a product of two dtypes takes 15 times as long (measured, bfloat16 and float32).
    scale = weights.reshape(-1).index_select(0, order).to(dtype)[:, None]
    return order.div(positions.shape[2], rounding_mode="floor"), scale

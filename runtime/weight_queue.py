"""Backward passes in two parts: gradients of inputs first, then those of weights, where a schedule says so.

What waits in between are products: the operands of each, and what the weights' other uses added. Torch's own split of a
backward graph (`torch.distributed.pipelining`) runs what both parts need twice (measured: 1.9 to 2.2 times the time of
a whole backward pass, and half of the exchanges of rows again).

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moec.runtime.action_log import note_action

Compute = Callable[[], Sequence[Tensor | None]]
"""Computes the gradients of some weights."""


_NO_TASK = -1


class _Product(NamedTuple):
    """Gradients to compute, and where in the graph they belong; None where there is no gradient."""

    edges: Sequence[GradientEdge | None]
    compute: Compute


class WeightQueue:
    """What the backward pass of one stage over one micro-batch leaves for later, in order."""

    def __init__(self) -> None:
        self._products: list[_Product] = []
        """Those of the layer whose backward pass runs."""
        self._units: list[_Unit] = []
        self._later: dict[_Unit, GradientEdge] = {}
        """Of each unit, where its backward pass goes on to the parameters."""
        self._ended: dict[_Unit, None] = {}
        """The units whose products are known."""
        self._task = _NO_TASK
        """The number of the backward pass that `to_inputs` runs."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside the block, this thread's forward pass makes a graph whose backward this queue cuts in two."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def to_inputs(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        """The backward pass to the inputs. Other passes through the graph, such as `torch.autograd.grad` in a loss or
        in a hook, put nothing off."""
        # A node of `outputs` runs before any hook could begin another pass.
        nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        hooks = [node.register_prehook(self._note_task) for node in nodes]
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._task = _NO_TASK
            for hook in hooks:
                hook.remove()

    def _note_task(self, *_: object) -> None:
        if self._task == _NO_TASK:
            self._task = torch._C._current_graph_task_id()

    @property
    def puts_off(self) -> bool:
        """Whether this is the pass of `to_inputs`."""
        return self._task != _NO_TASK and torch._C._current_graph_task_id() == self._task

    def split(self, name: str, weights: Sequence[Tensor], then: Callable[[], None] = lambda: None) -> Sequence[Tensor]:
        """The weights of the layer or segment `name`, for its graph. `then` runs when backward has left that graph.

        The graph ends there: `torch.autograd.grad` of a loss finds no gradients of parameters.
        """
        if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in weights):
            return weights
        unit = _Unit(name, weights, then)
        self._units.append(unit)
        self._later[unit] = get_gradient_edge(_Later.apply(unit, *weights))  # type: ignore[no-untyped-call]
        root = weights[0].new_zeros((), requires_grad=True)
        split: tuple[Tensor, ...] = _Split.apply(self, unit, root, list(weights))  # type: ignore[no-untyped-call]
        return split

    def put(self, weights: Sequence[GradientEdge | None], compute: Compute) -> None:
        """Leaves the gradients of these weights for later."""
        if any(weight is not None for weight in weights):
            self._products.append(_Product(weights, compute))

    def to_weights(self) -> None:
        """Computes everything that waits, a layer at a time, and gives each parameter its gradient."""
        edges = [self._later.pop(unit) for unit in self._ended]
        roots = [unit.root for unit in self._ended]
        self._ended.clear()
        torch.autograd.backward(edges, roots)

    def drop(self) -> None:
        """Drops what still waits, at the end of a step: an exception may have ended it, and Python's collector does not
        see the cycles of units and graphs."""
        for unit in self._units:
            unit.products.clear()
        for container in (self._units, self._products, self._later, self._ended):
            container.clear()

    def end(self, unit: _Unit) -> None:
        """A backward pass has left the graph of this unit: that of `to_inputs` with all its products."""
        self._ended[unit] = None
        if self.puts_off:
            unit.products += self._products
            self._products.clear()


class _Unit:
    """The weights of one use of a layer or segment: their gradients so far, and the products that will add to them."""

    def __init__(self, name: str, weights: Sequence[Tensor], then: Callable[[], None]) -> None:
        self.name, self.then = name, then
        self.root = weights[0].new_zeros(())
        """The gradient with which its backward pass goes on."""
        self.needed = [weight.requires_grad for weight in weights]
        self.gradients: list[Tensor | None] = [None] * len(weights)
        self.products: list[_Product] = []
        self.takes = False

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds to the gradients so far."""
        pairs = zip(self.gradients, gradients, strict=True)
        self.gradients = [a if b is None else b if a is None else a + b for a, b in pairs]

    def take(self) -> list[Tensor | None]:
        """Computes the products; gives all gradients, once."""
        self.takes = True
        while self.products:
            edges, compute = self.products.pop(0)
            pairs = [(e, g) for e, g in zip(edges, compute(), strict=True) if e is not None and g is not None]
            # Through whatever made the operands of the weights, to `_Split`.
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        gradients, self.gradients = self.gradients, [None] * len(self.gradients)
        return gradients


class _Split(torch.autograd.Function):
    """Weights for a graph that does not go on to the parameters: backward leaves their gradients with the unit."""

    @staticmethod
    def forward(ctx: Any, queue: WeightQueue, unit: _Unit, root: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.queue, ctx.unit = ref(queue), unit  # a weak reference: the queue holds the graph of weights
        ctx.set_materialize_grads(False)
        split = tuple(weight.detach() for weight in weights)
        ctx.mark_non_differentiable(*(w for w, needed in zip(split, unit.needed, strict=True) if not needed))
        return split

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        unit: _Unit = ctx.unit
        unit.add(gradients)
        if not unit.takes:
            note_action("backward", unit.name)
            unit.then()
            ctx.queue().end(unit)
        return (None,) * 4


class _Later(torch.autograd.Function):
    """Goes on to the parameters, with the gradients of the unit."""

    @staticmethod
    def forward(ctx: Any, unit: _Unit, *weights: Tensor) -> Tensor:
        ctx.unit = unit
        return torch.zeros_like(unit.root)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        unit: _Unit = ctx.unit
        return None, *unit.take()


_current: ContextVar[WeightQueue | None] = ContextVar("weight_queue", default=None)


def current_queue() -> WeightQueue | None:
    """The queue of this thread's forward pass; None outside of `WeightQueue.forward`."""
    return _current.get()


def edges_of(weights: Sequence[Tensor | None]) -> list[GradientEdge | None]:
    """Where the gradients of these weights belong; None for a weight without one."""
    return [get_gradient_edge(w) if w is not None and w.requires_grad else None for w in weights]

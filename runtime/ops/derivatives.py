"""Derivatives of the operators beyond one backward pass: each is correct, or raises an error.

An operator's own rule gives first derivatives, in the time of a training step. Second derivatives, forward mode and the
transforms of `torch.func` run the operator's composition (`compositions.py`), which PyTorch differentiates. An operator
without one refuses them: left to itself, torch takes such derivatives for zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch._library.utils import fill_defaults

from moec.runtime.refused_derivatives import beyond_backward, is_tracked, no_derivative

Composition = Callable[[Sequence[Any], Sequence[Any]], tuple[Tensor, ...]]
"""Recomputes, from an operator's arguments and results, its differentiable results: the first ones."""

SavedInputs = Callable[..., tuple[Sequence[Any], Sequence[Any]]]
"""From `ctx` of backward and the gradients: the arguments and results that the composition uses.

An argument of which only the shape matters may be zeros; an argument that is None or left out has no gradient.
"""


@dataclass(slots=True)
class Rule:
    """The derivatives of an operator: `ordinary` in backward, `composition` elsewhere. Without both it refuses."""

    ordinary: Callable[..., Any] | None = None
    composition: Composition | None = None


def kernel_of(operator: Any, rule: Rule) -> Callable[..., Any]:
    """The operator's kernel for autograd; it reads `rule` in every call."""

    def run(keyset: Any, *arguments: Any) -> Any:
        if not beyond_backward():
            if rule.ordinary is not None:
                return rule.ordinary(keyset, *arguments)
            if not torch.is_grad_enabled():  # in backward, where it saves time to set no guard
                return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
            if any(map(is_tracked, arguments)):
                raise no_derivative(operator.name(), "derivative")
            return _below(operator, keyset, arguments)
        results = _below(operator, keyset, arguments)
        if not any(map(is_tracked, arguments)):
            return results
        if rule.composition is None:
            raise no_derivative(operator.name(), "derivative in forward mode or `torch.func`")
        return _recomposed(operator, rule.composition, arguments, results)

    return run


def _below(operator: Any, keyset: Any, arguments: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _recomposed(operator: Any, composition: Composition, arguments: Sequence[Any], results: Any) -> Any:
    several = isinstance(results, (tuple, list))
    inputs, _ = fill_defaults(operator._schema, arguments, {})  # type: ignore[no-untyped-call]
    results = tuple(results) if several else (results,)
    try:
        differentiable = composition(inputs, results)
    except RuntimeError as error:
        if "vmap" in str(error):  # of sizes that depend on data, such as those of `nonzero`
            help = "differentiate each part of the batch in a loop"
            raise no_derivative(operator.name(), "derivative inside of `torch.func.vmap`", help) from error
        raise
    results = (*differentiable, *results[len(differentiable) :])
    return results if several else results[0]


def ordinary(operator: Any, setup: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel of the rule `backward(ctx, *gradients)`, as `torch.library.register_autograd` makes it."""
    return make_autograd_impl(operator, Info(backward, setup))


def gradients_of(composition: Composition, saved: SavedInputs, ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Backward by the composition: differentiable, with a graph where gradients have one."""
    inputs, outputs = saved(ctx, *gradients)
    needed = [
        i for i, (needs, x) in enumerate(zip(ctx.needs_input_grad, inputs, strict=False)) if needs and x is not None
    ]
    with torch.enable_grad():
        leaves = {}
        for i in needed:  # a view for each: one tensor may be given as two arguments
            x = inputs[i]
            leaves[i] = (x if x.requires_grad else x.detach().requires_grad_()).view_as(x)
        results = composition([leaves.get(i, x) for i, x in enumerate(inputs)], outputs)
        pairs = [(r, g) for r, g in zip(results, gradients, strict=False) if g is not None and r.requires_grad]
    computed: Sequence[Tensor | None] = [None] * len(needed)
    if pairs:
        tensors, result_gradients = zip(*pairs, strict=True)
        computed = torch.autograd.grad(
            tensors, list(leaves.values()), result_gradients, create_graph=torch.is_grad_enabled(), allow_unused=True
        )
    by_index = {i: torch.zeros_like(leaves[i]) if g is None else g for i, g in zip(needed, computed, strict=True)}
    return tuple(by_index.get(i) for i in range(len(ctx.needs_input_grad)))

"""Refuses derivatives that an operator does not have: second ones, forward mode, and transforms of `torch.func`.

Torch takes what it cannot differentiate for a constant in forward mode and in `torch.func`, and after
`once_differentiable` also in `torch.autograd.grad`: a wrong number, and no error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moec.runtime.errors import JobError

HELP = (
    "`backward` and `torch.autograd.grad` give first derivatives everywhere; others need one rank and "
    "fp32: `dtype = fp32` in the file, or `moec.reference(…, dtype=torch.float32)`"
)


def no_derivative(name: str, kind: str, help: str = HELP) -> JobError:
    """The error MOE0729: `name` has no `kind`."""
    return JobError("MOE0729", f"{name} has no {kind}", help)


def in_transform() -> bool:
    """Whether a transform of `torch.func` is on."""
    return torch._C._are_functorch_transforms_active()


def in_vmap() -> bool:
    """Whether `torch.func.vmap` is on, around or inside of other transforms: tensors have no single values then."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def unwrapped(value: Tensor) -> Tensor:
    """The tensor without the wrappers of `torch.func`'s transforms: it may be kept after them. Not for `vmap`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def beyond_backward() -> bool:
    """Whether forward mode or a transform of `torch.func` is on."""
    return forward_ad._current_level >= 0 or in_transform()


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward mode differentiates with respect to the tensor."""
    if not tensor.is_floating_point():
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def is_tracked(value: object) -> bool:
    """Whether some mode differentiates with respect to the value."""
    return isinstance(value, Tensor) and ((value.requires_grad and torch.is_grad_enabled()) or has_tangent(value))


def once_differentiable(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a `backward(ctx, *gradients)` whose results refuse to be differentiated again."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def refusing(ctx: Any, *gradients: Any) -> Any:
            if not torch.is_grad_enabled() and forward_ad._current_level < 0:
                return backward(ctx, *gradients)
            return _refusing(name, backward, _Unpacked(ctx), gradients)

        return refusing

    return decorate


def _refusing(name: str, backward: Callable[..., Any], ctx: _Unpacked, gradients: tuple[Any, ...]) -> Any:
    tensors = [tensor for tensor in (*gradients, *ctx.saved_tensors) if tensor is not None]
    if any(map(has_tangent, tensors)):
        raise no_derivative(name, "derivative in forward mode")
    with torch.no_grad():
        results = backward(ctx, *(None if gradient is None else gradient.detach() for gradient in gradients))
    tracked = [tensor for tensor in tensors if tensor.requires_grad]
    if not tracked or not torch.is_grad_enabled():
        return results
    outputs = list(results) if isinstance(results, tuple) else [results]
    places = [i for i, output in enumerate(outputs) if isinstance(output, Tensor)]
    refusing = _Refused.apply(name, len(places), *(outputs[i] for i in places), *tracked)  # type: ignore[no-untyped-call]
    for place, output in zip(places, refusing, strict=True):
        outputs[place] = output
    return tuple(outputs) if isinstance(results, tuple) else outputs[0]


class _Unpacked:
    """A `ctx` whose saved tensors may be read again: a checkpoint unpacks each of them once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refused(torch.autograd.Function):
    """The first `number` tensors, as functions of all others, without a derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(tensor.detach() for tensor in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise no_derivative(ctx.name, "second derivative")

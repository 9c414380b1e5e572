"""Defines the operator of a conversion from a kernel, a check and a fake, and its backward from the op's class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir.operator_schema import given_attributes, num_tensors, schema_of
from moec.passes.ir.ops.conversion import Conversion, Unconverted
from moec.runtime.ops.registry import Check, check, define, differentiate
from moec.runtime.ranks.watch import Layer, backward_of


def define_conversion(
    kind: type[Conversion], *, fake: Callable[..., Any], check: Check, kernel: Callable[..., Any], **fixed: Any
) -> Any:
    """Defines the operator of a conversion, with the backward that the class declares, and returns its overload.

    `fixed` are attributes that the operator's name contains (`reduce="max"`). Backward calls the operator of
    `Conversion.backward` with the gradient and the other operands of forward.
    """
    operator = define(schema_of(kind, kind.operator_of(**fixed)), fake=fake, check=check, kernel=kernel)
    tensors, names = num_tensors(kind), given_attributes(kind)

    @cache  # 8 µs in every forward without it
    def declared(group: str, *attributes: Any) -> Conversion | Unconverted:
        return kind.over(group, **fixed, **dict(zip(names, attributes, strict=True))).backward()

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *attributes, group, ctx.site, layer = inputs[tensors:]
        ctx.conversion, ctx.num_inputs = declared(group, *attributes), len(inputs)
        ctx.rows = inputs[0].shape[0] if "rows" in kind.carries else None
        # A `WeightQueue` passes twice through a conversion of a weight, which saves nothing that autograd would free.
        ctx.layer = layer
        if tensors > 1:
            ctx.save_for_backward(*inputs[1:tensors])
        if ctx.conversion == "none":
            ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Any, ...]:
        operands = ctx.saved_tensors if tensors > 1 else ()
        converted = _converted(ctx.conversion, gradient, operands, ctx.site, ctx.layer)
        if ctx.rows is not None:
            # Tells a compiler, to which the size is data, that as many rows come back as were sent.
            _check_rows(operator, converted, ctx.rows)
        return (converted, *(None for _ in range(ctx.num_inputs - 1)))

    differentiate(operator, setup=setup, backward=backward)
    return operator


def _converted(
    op: Conversion | Unconverted, gradient: Tensor, operands: Sequence[Tensor], site: str, layer: Layer
) -> Tensor:
    if isinstance(op, str):
        return gradient
    operator = getattr(torch.ops.moec, op.torch_operator()).default
    attributes = (getattr(op, name) for name in given_attributes(type(op)))
    converted: Tensor = operator(gradient, *operands, *attributes, op.axis, backward_of(site), layer)
    return converted


def _check_rows(operator: Any, gradient: Tensor, rows: int) -> None:
    check(
        gradient.shape[0] == rows,
        lambda: f"{operator.name()}: {rows} rows went, and gradients of {gradient.shape[0]} came back",
    )

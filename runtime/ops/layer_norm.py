"""`layer_norm` for narrow dtypes: gradients of weight and bias are summed in at least float32.

torch's layer_norm sums them in their dtype on CPU, where small terms vanish beside a large sum: 75 % of a bias's
gradient over 4,096 tokens in bfloat16 was lost (measured).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    check(
        weight.shape == x.shape[-1:] and (bias is None or bias.shape == weight.shape),
        lambda: f"moec::layer_norm: wants vectors of {x.shape[-1]}, not {list(weight.shape)}",
    )


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    normed: Tensor = torch.ops.aten.layer_norm.default(x, list(weight.shape), weight, bias, eps)
    return normed


layer_norm = define(
    schema_of(o.LayerNorm, "layer_norm"),
    fake=lambda x, weight, bias, eps: x.new_empty(x.shape),
    check=_check,
    kernel=_layer_norm,
)
"""`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dim (Ba et al. 2016), in at least float32.

x [..., D], weight and bias [D], all of one floating dtype -> [..., D].
"""


def _backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dtype, shape = torch.promote_types(x.dtype, torch.float32), list(weight.shape)
    wide, vector = x.to(dtype), weight.to(dtype)
    _, mean, scale = torch.ops.aten.native_layer_norm.default(wide, shape, None, None, eps)
    gradients = torch.ops.aten.native_layer_norm_backward.default(
        grad.to(dtype).contiguous(), wide, shape, mean, scale, vector, vector, [True, True, True]
    )
    grad_x, grad_weight, grad_bias = (gradient.to(x.dtype) for gradient in gradients)
    return grad_x, grad_weight, grad_bias


layer_norm_backward = define(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, x, weight, eps: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape),
    ),
    check=lambda grad, x, weight, eps: _check(x, weight, None, eps),
    kernel=_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _saved_inputs(ctx: Any, grad: Tensor) -> tuple[tuple[Any, ...], tuple[()]]:
    x, weight = ctx.saved_tensors
    return (x, weight, torch.zeros_like(weight) if ctx.biased else None, ctx.eps), ()


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    grad_x, grad_weight, grad_bias = layer_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
    return grad_x, grad_weight, grad_bias if ctx.biased else None, None


differentiate(
    layer_norm,
    setup=_setup,
    backward=_differentiate,
    composition=lambda inputs, outputs: (compositions.normed(*inputs),),
    saved_inputs=_saved_inputs,
)

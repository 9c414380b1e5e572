"""`rope`, `swiglu` and `geglu`: the operators that attention and dense feed-forwards need."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moec.runtime.ops.registry import check, define, differentiate

# ---- rope --------------------------------------------------------------------------------------------


def _check_rope(x: Tensor, theta: float) -> None:
    check(x.dim() == 4, lambda: f"moec::rope: x must be [B, S, H, head dim], not {list(x.shape)}")
    check(x.shape[-1] % 2 == 0, lambda: f"moec::rope: the head dim must be even, not {x.shape[-1]}")
    check(x.is_floating_point(), lambda: f"moec::rope: x must be floating point, not {x.dtype}")


def _fake_rope(x: Tensor, theta: float) -> Tensor:
    return x.new_empty(x.shape)


rope = define("rope(Tensor x, float theta) -> Tensor", fake=_fake_rope, check=_check_rope)
rope_backward = define("rope_backward(Tensor grad, float theta) -> Tensor", fake=_fake_rope, check=_check_rope)
"""`rope`: rotary positions 0..S-1 (Su et al. 2021, eq. 34; the half-split layout of Llama and Hugging Face).

x [B, S, H, head dim], any floating dtype -> the same. Angles are computed in float32, or in float64 for float64.
"""


def _setup_rope(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.theta = inputs[1]


def _differentiate_rope(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return rope_backward(grad, ctx.theta), None


differentiate(rope, setup=_setup_rope, backward=_differentiate_rope)

# ---- swiglu, geglu -----------------------------------------------------------------------------------


def _define_gated(name: str) -> tuple[Any, Any]:
    """The operator `moec::name`, x [..., 2, F] -> [..., F], and the one of its gradient."""

    def check_forward(x: Tensor) -> None:
        check(x.dim() >= 2 and x.shape[-2] == 2, lambda: f"moec::{name}: x must be [..., 2, F], not {list(x.shape)}")
        check(x.is_floating_point(), lambda: f"moec::{name}: x must be floating point, not {x.dtype}")

    def check_backward(grad: Tensor, x: Tensor) -> None:
        check_forward(x)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x: Tensor = gated_backward(grad, x)
        return grad_x

    gated = define(f"{name}(Tensor x) -> Tensor", fake=_fake_gated, check=check_forward)
    gated_backward = define(
        f"{name}_backward(Tensor grad, Tensor x) -> Tensor", fake=_fake_gated_backward, check=check_backward
    )
    differentiate(gated, setup=setup, backward=backward)
    return gated, gated_backward


def _fake_gated(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


def _fake_gated_backward(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


swiglu, swiglu_backward = _define_gated("swiglu")
"""`silu(x[..., 0, :]) * x[..., 1, :]` (Shazeer 2020): x [..., 2, F] -> [..., F], computed in at least float32."""

geglu, geglu_backward = _define_gated("geglu")
"""`gelu(x[..., 0, :]) * x[..., 1, :]` (ibid.) with the exact gelu: x [..., 2, F] -> [..., F], in at least float32."""

"""`rope` and `gated`: the operators that attention and dense feed-forwards need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops import compositions
from moec.runtime.ops.expert_mlp import check_activation
from moec.runtime.ops.registry import check, define, differentiate

# ---- rope --------------------------------------------------------------------------------------------


def _check_rope(
    x: Tensor,
    positions: Tensor | None,
    theta: float,
    start: int = 0,
    width: int = 0,
    interleaved: bool = False,
    frequencies: Sequence[float] = (),
    factor: float = 1.0,
) -> None:
    check(x.dim() == 4, lambda: f"moec::rope: x must be [B, S, H, head dim], not {list(x.shape)}")
    turning = width or x.shape[-1] - start
    check(turning % 2 == 0, lambda: f"moec::rope: the dims that turn must be even, not {turning}")
    check(
        start >= 0 and turning > 0 and start + turning <= x.shape[-1],
        lambda: f"moec::rope: {turning} dims from {start} must be in a head dim of {x.shape[-1]}",
    )
    check(
        len(frequencies) in (0, turning // 2),
        lambda: f"moec::rope: there must be {turning // 2} frequencies or none, not {len(frequencies)}",
    )
    check(x.is_floating_point(), lambda: f"moec::rope: x must be floating point, not {x.dtype}")
    check(
        positions is None or (positions.shape == x.shape[:2] and positions.dtype == torch.int64),
        lambda: f"moec::rope: positions must be int64 {list(x.shape[:2])}, not {positions}",
    )


def _fake_rope(x: Tensor, positions: Tensor | None, *attributes: Any) -> Tensor:
    return x.new_empty(x.shape)


rope = define(schema_of(o.Rope), fake=_fake_rope, check=_check_rope)
rope_backward = define(schema_of(o.Rope, "rope_backward"), fake=_fake_rope, check=_check_rope)
"""`rope`: rotary positions (Su et al. 2021, eq. 34; the half-split layout of Llama and Hugging Face, or `interleaved`
pairs of neighbours as in GPT-J).

x [B, S, H, head dim], any floating dtype -> the same; the `width` dims from `start` turn, all for `width` 0.
`positions` int64 [B, S], from 0 to S - 1; without them 0..S-1 in each sequence. `frequencies` in radians per position,
one for each pair; an empty list stands for theta^(-2i / width). The dims that turn are multiplied by `factor`. Angles
are computed in float32, or in float64 for float64.
"""


def _setup_rope(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, *ctx.attributes = inputs
    ctx.save_for_backward(positions)


def _differentiate_rope(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (positions,) = ctx.saved_tensors
    return rope_backward(grad, positions, *ctx.attributes), None, *(None for _ in ctx.attributes)


differentiate(
    rope,
    setup=_setup_rope,
    backward=_differentiate_rope,
    composition=lambda inputs, outputs: (compositions.turned(*inputs),),
    saved_inputs=lambda ctx, grad: ((torch.zeros_like(grad), *ctx.saved_tensors, *ctx.attributes), ()),
)

# ---- gated -------------------------------------------------------------------------------------------


def _check_gated(x: Tensor, activation: str, *parameters: float | None) -> None:
    check_activation("gated", activation, *parameters)
    check(
        activation in GATED,
        lambda: f"moec::gated: activation must be one of {', '.join(GATED)}, not {activation!r}",
    )
    check(x.dim() >= 2 and x.shape[-2] == 2, lambda: f"moec::gated: x must be [..., 2, F], not {list(x.shape)}")
    check(x.is_floating_point(), lambda: f"moec::gated: x must be floating point, not {x.dtype}")


def _fake_gated(x: Tensor, activation: str, *_: float | None) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


GATED = tuple(kind.word for kind in ACTIVATIONS.values() if kind.gated)

_PARAMETERS = "float? clamp=None, float? alpha=None"

gated = define(f"gated(Tensor x, str activation, {_PARAMETERS}) -> Tensor", fake=_fake_gated, check=_check_gated)
gated_backward = define(
    f"gated_backward(Tensor grad, Tensor x, str activation, {_PARAMETERS}) -> Tensor",
    fake=lambda grad, x, *_: x.new_empty(x.shape),
    check=lambda grad, *arguments: _check_gated(*arguments),
)
"""`gated`: `f(x[..., 0, :]) * x[..., 1, :]` (Shazeer 2020) with the function f of a gated activation; clamp
and alpha as in `kind_of`.

x [..., 2, F], any floating dtype -> [..., F]; f and the product are computed in at least float32.
"""


def _setup_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.activation = inputs
    ctx.save_for_backward(x)


def _differentiate_gated(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (x,) = ctx.saved_tensors
    return gated_backward(grad, x, *ctx.activation), None, None, None


differentiate(
    gated,
    setup=_setup_gated,
    backward=_differentiate_gated,
    composition=lambda inputs, outputs: (compositions.activated(*inputs),),
    saved_inputs=lambda ctx, grad: ((*ctx.saved_tensors, *ctx.activation), ()),
)

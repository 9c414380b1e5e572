"""`token_keys`, `jitter` and `normal_noise`: random numbers that depend on the token, not on the rank that has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate

# ---- token_keys --------------------------------------------------------------------------------------


def _check_token_keys(ids: Tensor, sequences: Tensor, seed: Tensor, step: Tensor) -> None:
    check(
        ids.dim() == 2 and ids.dtype == torch.int64,
        lambda: f"moec::token_keys: ids must be int64 [B, S], not {ids.dtype} {list(ids.shape)}",
    )
    check(
        sequences.shape == ids.shape[:1] and sequences.dtype == torch.int64,
        lambda: f"moec::token_keys: sequences must be int64 [B], not {sequences.dtype} {list(sequences.shape)}",
    )
    settings = (seed, step)
    check(
        all(setting.dim() == 0 and setting.dtype == torch.int64 for setting in settings),
        lambda: f"moec::token_keys: seed and step must be int64 scalars, not {settings}",
    )


token_keys = define(
    schema_of(o.TokenKeys),
    fake=lambda ids, sequences, seed, step: torch.empty_like(ids),
    check=_check_token_keys,
    gives_integers=True,
)
"""A key of each token: ids int64 [B, S], sequences int64 [B] below 2^32, settings on CPU -> int64 [B, S].

Two words of Philox4x32-10 of the counter (place, sequence, low and high half of `step`), keyed by `seed`.
"""

# ---- jitter ------------------------------------------------------------------------------------------


def _check_jitter(x: Tensor, keys: Tensor, training: Tensor, layer: Tensor, amount: float, stream: int) -> None:
    check(
        x.dim() == 3 and x.is_floating_point(),
        lambda: f"moec::jitter: x must be floating [B, S, dim], not {x.dtype} {list(x.shape)}",
    )
    check(
        keys.shape == x.shape[:2] and keys.dtype == torch.int64,
        lambda: f"moec::jitter: keys must be int64 {list(x.shape[:2])}, not {keys.dtype} {list(keys.shape)}",
    )


def _fake_jitter(x: Tensor, keys: Tensor, training: Tensor, layer: Tensor, amount: float, stream: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


jitter = define(schema_of(o.Jitter), fake=_fake_jitter, check=_check_jitter)
"""`x · (1 + amount · u)` where `training` is 1, else x (Fedus et al. 2021, section 2.2).

x [B, S, dim] of any floating dtype, keys int64 [B, S] of `token_keys`, `training` and `layer` int64 scalars on CPU ->
[B, S, dim] in at least fp32. u is uniform in [-1, 1): word i % 4, without its 8 low bits, of Philox4x32-10 of the
counter (i // 4, layer, stream, 0) for element i of the token, keyed by the token's key. Backward multiplies the
gradient by the same factors.
"""


def _setup_jitter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, keys, training, layer, ctx.amount, ctx.stream = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(keys, training, layer)


def _factored(x: Tensor, *arguments: Any) -> Tensor:
    wide = compositions.wide(x)
    factors: Tensor = jitter(torch.ones_like(wide), *arguments)
    return wide * factors


def _differentiate_jitter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    keys, training, layer = ctx.saved_tensors
    factored: Tensor = jitter(grad, keys, training, layer, ctx.amount, ctx.stream)
    return factored.to(ctx.dtype), None, None, None, None, None


differentiate(
    jitter,
    setup=_setup_jitter,
    backward=_differentiate_jitter,
    composition=lambda inputs, outputs: (_factored(*inputs),),
)

# ---- normal_noise ------------------------------------------------------------------------------------


def _check_normal_noise(logits: Tensor, keys: Tensor, training: Tensor, layer: Tensor, stream: int) -> None:
    check(
        logits.dim() == 3 and logits.dtype in (torch.float32, torch.float64),
        lambda: (
            f"moec::normal_noise: logits must be float32 or float64 [B, S, E], not {logits.dtype} {list(logits.shape)}"
        ),
    )
    check(
        keys.shape == logits.shape[:2] and keys.dtype == torch.int64,
        lambda: f"moec::normal_noise: keys must be int64 {list(logits.shape[:2])}, not {keys.dtype} {list(keys.shape)}",
    )


normal_noise = define(
    schema_of(o.NormalNoise),
    fake=lambda logits, keys, training, layer, stream: logits.new_empty(logits.shape),
    check=_check_normal_noise,
)
"""Standard normal numbers of the logits' shape and dtype where `training` is 1, else zeros.

logits [B, S, E], float32 or float64, of which only shape and dtype are used; keys int64 [B, S] of `token_keys`;
`training` and `layer` int64 scalars on CPU. Element i of a token is number i % 4 that Box and Muller give of the four
words of Philox4x32-10 of the counter (i // 4, layer, stream, 0), keyed by the token's key
(`moec.runtime.philox.box_muller`). Not differentiated.
"""


def _setup_normal_noise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


differentiate(
    normal_noise,
    setup=_setup_normal_noise,
    backward=lambda ctx, grad: (None,) * 5,
    composition=lambda inputs, outputs: (),
)

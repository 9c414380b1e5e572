"""Weights that travel with rows: `permute_weights` puts them beside rows, `sum_rows` adds up the weighted rows.

A token's weighted sum then needs no expert's output in backward: the expert's rank computes the gradient of the weight
(`expert_mlp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate

# ---- permute_weights ---------------------------------------------------------------------------------


def _check_permute_weights(weights: Tensor, positions: Tensor, rows: Tensor) -> None:
    check(
        positions.dim() == 3 and positions.shape == weights.shape and rows.dim() in (2, 3),
        lambda: (
            "moec::permute_weights: weights and positions must be [B, S, k], and rows [R, D] or [E, N, D], not "
            f"{list(weights.shape)}, {list(positions.shape)} and {list(rows.shape)}"
        ),
    )
    check(positions.dtype == torch.int64, lambda: f"moec::permute_weights: positions are {positions.dtype}, not int64")


def _permute_weights(weights: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    shape = rows.shape[:-1]
    # Dropped choices write to one extra element, which is then cut off.
    places = positions.where(positions >= 0, shape.numel()).view(-1)
    permuted = weights.new_zeros(shape.numel() + 1).index_copy_(0, places, weights.reshape(-1))
    return permuted[:-1].view(shape)


permute_weights = define(
    schema_of(o.PermuteWeights),
    fake=lambda weights, positions, rows: weights.new_empty(rows.shape[:-1]),
    check=_check_permute_weights,
    kernel=_permute_weights,
)
"""Each row's weight: out[positions[t, j]] = weights[t, j], and 0 for empty places.

weights [B, S, k], positions [B, S, k] int64 (−1 for dropped choices), rows [R, D] or [E, N, D], only for their
shape -> [R] or [E, N], in the weights' dtype.
"""


def _weights_at(grad: Tensor, positions: Tensor) -> Tensor:
    if not grad.numel():
        return grad.new_zeros(positions.shape)
    return grad.reshape(-1)[positions.clamp_min(0)].masked_fill_(positions < 0, 0)


permute_weights_backward = define(
    "permute_weights_backward(Tensor grad, Tensor positions) -> Tensor",
    fake=lambda grad, positions: grad.new_empty(positions.shape),
    check=lambda grad, positions: None,
    kernel=_weights_at,
)


def _setup_permute_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, _ = inputs
    ctx.save_for_backward(positions)


def _saved_inputs(ctx: Any, grad: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
    (positions,) = ctx.saved_tensors
    return (grad.new_zeros(positions.shape), positions), (grad,)


def _differentiate_permute_weights(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (positions,) = ctx.saved_tensors
    return permute_weights_backward(grad, positions), None, None


differentiate(
    permute_weights,
    setup=_setup_permute_weights,
    backward=_differentiate_permute_weights,
    composition=lambda inputs, outputs: (compositions.permuted_weights(inputs[0], inputs[1], outputs[0].shape),),
    saved_inputs=_saved_inputs,
)

# ---- sum_rows ----------------------------------------------------------------------------------------


def _check_sum_rows(rows: Tensor, positions: Tensor, counts: Tensor) -> None:
    check(
        rows.dim() in (2, 3) and positions.dim() == 3 and counts.dim() == 2,
        lambda: (
            "moec::sum_rows: rows must be [R, D] or [E, N, D], positions [B, S, k] and counts [1, E], not "
            f"{list(rows.shape)}, {list(positions.shape)} and {list(counts.shape)}"
        ),
    )


sum_rows = define(
    schema_of(o.SumRows),
    fake=lambda rows, positions, counts: rows.new_empty((*positions.shape[:2], rows.shape[-1])),
    check=_check_sum_rows,
)
"""The sum of each token's rows: out[t] = Σⱼ rows[positions[t, j]].

rows [R, D] of any floating dtype, positions [B, S, k] int64 naming every row once, −1 for no row, counts [1, E] int64;
or rows [E, N, D], of each expert the first `counts` not empty -> [B, S, D], added up in at least float32. It gathers,
and so is deterministic.
Raises `RuntimeError` unless there are as many rows [R, D] as positions that name one, as `combine` does.
"""


def _check_backward(grad: Tensor, positions: Tensor, counts: Tensor, shape: Sequence[int]) -> None:
    check(
        grad.dim() == 3 and grad.shape[:2] == positions.shape[:2],
        lambda: f"moec::sum_rows_backward: grad is {list(grad.shape)} for positions {list(positions.shape)}",
    )


sum_rows_backward = define(
    "sum_rows_backward(Tensor grad, Tensor positions, Tensor counts, SymInt[] shape) -> Tensor",
    fake=lambda grad, positions, counts, shape: grad.new_empty((*shape, grad.shape[2])),
    check=_check_backward,
)
"""The gradient of rows of `shape`, [R] or [E, N]: each row gets its token's gradient, an empty place zeros."""


def _setup_sum_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, positions, counts = inputs
    ctx.shape = list(rows.shape[:-1])
    ctx.save_for_backward(positions, counts)


def _differentiate_sum_rows(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return sum_rows_backward(grad, *ctx.saved_tensors, ctx.shape), None, None


differentiate(
    sum_rows,
    setup=_setup_sum_rows,
    backward=_differentiate_sum_rows,
    composition=lambda inputs, outputs: (compositions.combined(*inputs[:2]),),
    saved_inputs=lambda ctx, grad: ((grad.new_zeros(*ctx.shape, grad.shape[2]), *ctx.saved_tensors), ()),
)

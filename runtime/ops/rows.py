"""`permute` and `combine`: from tokens to rows sorted by expert, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate, save_inputs

# ---- permute -----------------------------------------------------------------------------------------


def _check_permute(x: Tensor, experts: Tensor, num_experts: int, some_are_none: bool = False) -> None:
    check(
        x.dim() == 3 and experts.dim() == 3 and x.shape[:2] == experts.shape[:2],
        lambda: (
            f"moec::permute: x must be [B, S, D] and experts [B, S, k], not {list(x.shape)} and {list(experts.shape)}"
        ),
    )
    check(experts.dtype == torch.int64, lambda: f"moec::permute: experts must be int64, not {experts.dtype}")
    check(num_experts >= 1, lambda: f"moec::permute: num_experts must be at least 1, not {num_experts}")


def _fake_permute(
    x: Tensor, experts: Tensor, num_experts: int, some_are_none: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size() if some_are_none else experts.numel()
    rows = x.new_empty((num_rows, x.shape[-1]))
    return rows, experts.new_empty((1, num_experts)), experts.new_empty(experts.shape)


permute = define(
    schema_of(o.Permute),
    fake=_fake_permute,
    check=_check_permute,
)
"""A copy of each token per choice, sorted by expert.

x [B, S, D] any dtype, experts [B, S, k] int64 ->
  - rows [B·S·k, D]: by expert, and within an expert in token order, then by choice;
  - counts [1, num_experts] int64: how many rows each expert got;
  - positions [B, S, k] int64: the row that choice j of token t became.
With `some_are_none` a choice may be −1: it gets no row, and its position is −1. The number of rows is then data, and is
copied to the host.
The sort is stable. Raises `RuntimeError` on CPU if an expert index is out of range.
"""


def _check_permute_backward(grad: Tensor, positions: Tensor) -> None:
    check(grad.dim() == 2, lambda: f"moec::permute_backward: grad must be [R, D], not {list(grad.shape)}")


def _fake_permute_backward(grad: Tensor, positions: Tensor) -> Tensor:
    return grad.new_empty((*positions.shape[:2], grad.shape[-1]))


permute_backward = define(
    "permute_backward(Tensor grad, Tensor positions) -> Tensor",
    fake=_fake_permute_backward,
    check=_check_permute_backward,
)


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, counts, positions = output
    ctx.mark_non_differentiable(counts, positions)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(positions)


def compose_permuted(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Tensor]:
    """The composition of rows [R, D], or [E, N, D] in places."""
    return (compositions.permuted(inputs[0], outputs[2], outputs[0].shape[:-1]),)


def permuted_inputs(ctx: Any, grad: Tensor, *_: Any) -> tuple[tuple[Tensor], tuple[Tensor, None, Tensor]]:
    """The arguments and results for `compose_permuted`: zeros for the tokens, of which only the shape matters."""
    (positions,) = ctx.saved_tensors
    return (grad.new_zeros(*positions.shape[:2], grad.shape[-1]),), (grad, None, positions)


def _differentiate_permute(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None]:
    (positions,) = ctx.saved_tensors
    return None if grad is None else permute_backward(grad, positions), None, None, None


differentiate(
    permute,
    setup=_setup_permute,
    backward=_differentiate_permute,
    composition=compose_permuted,
    saved_inputs=permuted_inputs,
)

# ---- combine -----------------------------------------------------------------------------------------


def _check_combine(rows: Tensor, positions: Tensor, weights: Tensor) -> None:
    check(
        rows.dim() == 2 and positions.dim() == 3 and positions.shape == weights.shape,
        lambda: (
            "moec::combine: rows must be [R, D], positions and weights [B, S, k], not "
            f"{list(rows.shape)}, {list(positions.shape)} and {list(weights.shape)}"
        ),
    )
    check(
        weights.dtype in (torch.float32, torch.float64),
        lambda: f"moec::combine: weights must be float32 or float64, not {weights.dtype}",
    )


def _fake_combine(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty((*positions.shape[:2], rows.shape[-1]))


combine = define(schema_of(o.Combine), fake=_fake_combine, check=_check_combine)
"""The weighted sum of each token's rows: out[t] = Σⱼ weights[t, j] · rows[positions[t, j]].

rows [R, D] any floating dtype, positions [B, S, k] int64 naming every row once, −1 for no row, weights [B, S, k]
float32 or float64 -> [B, S, D] in the rows' dtype, accumulated in at least float32. It gathers, and so is
deterministic.
Raises `RuntimeError` unless there are as many rows as positions that name one (on other devices than CPU: if there are
more rows than positions).
"""


combine_backward = define(
    "combine_backward(Tensor grad, Tensor rows, Tensor positions, Tensor weights) -> (Tensor, Tensor)",
    fake=lambda grad, rows, positions, weights: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    check=lambda grad, rows, positions, weights: _check_combine(rows, positions, weights),
)


def _differentiate_combine(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    grad_rows, grad_weights = combine_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


differentiate(
    combine,
    setup=save_inputs,
    backward=_differentiate_combine,
    composition=lambda inputs, outputs: (compositions.combined(*inputs),),
    saved_inputs=lambda ctx, grad: (ctx.saved_tensors, ()),
)

"""`expert_linear`: every local expert's matrix over the rows that it received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moec.runtime.backends import select
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate
from moec.runtime.weight_queue import Compute


def _check(rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check(
        rows.dim() == 2 and counts.dim() == 2 and weight.dim() == 3,
        lambda: (
            "moec::expert_linear: rows must be [R, I], counts [sources, E] and weight [E, O, I], not "
            f"{list(rows.shape)}, {list(counts.shape)} and {list(weight.shape)}"
        ),
    )
    check(
        counts.shape[1] == weight.shape[0]
        and rows.shape[1] == weight.shape[2]
        and (bias is None or bias.shape == weight.shape[:2]),
        lambda: (
            f"moec::expert_linear: weight {list(weight.shape)} does not fit rows {list(rows.shape)}, counts "
            f"{list(counts.shape)} and bias {None if bias is None else list(bias.shape)}"
        ),
    )
    check(
        rows.dtype == weight.dtype and (bias is None or bias.dtype == rows.dtype),
        lambda: f"moec::expert_linear: rows, weight and bias must share a dtype, not {rows.dtype} and {weight.dtype}",
    )


def _fake(rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


expert_linear = define(
    "expert_linear(Tensor rows, Tensor counts, Tensor weight, Tensor? bias) -> Tensor", fake=_fake, check=_check
)
"""`row @ weight[e]ᵀ + bias[e]` for the rows of each expert e.

rows [R, I], counts [sources, E] int64, weight [E, O, I], bias [E, O] or None; all but counts of one floating dtype.
Rows are sorted by source, then by expert. Gives [R, O] in the rows' order.
Raises `RuntimeError` if the counts do not add up to R.
"""


def _check_backward(grad: Tensor, rows: Tensor, counts: Tensor, weight: Tensor, has_bias: bool) -> None:
    _check(rows, counts, weight, None)
    shape = rows.shape[0], weight.shape[1]
    check(grad.shape == shape, lambda: f"moec::expert_linear_backward: grad must be {list(shape)}")


def _fake_backward(
    grad: Tensor, rows: Tensor, counts: Tensor, weight: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = weight.new_empty(weight.shape[:2] if has_bias else 0)
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape), grad_bias


expert_linear_backward = define(
    "expert_linear_backward(Tensor grad, Tensor rows, Tensor counts, Tensor weight, bool has_bias)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    check=_check_backward,
)
"""The gradients of rows, weight and bias; that of the bias has shape [0] without `has_bias`."""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(*tensors)


def _compose(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Tensor]:
    rows, counts, *matrices = inputs
    return (compositions.linear_by_expert(rows, compositions.experts_of_rows(counts), *matrices),)


def _saved_inputs(ctx: Any, grad: Tensor) -> tuple[tuple[Any, ...], tuple[()]]:
    rows, counts, weight = ctx.saved_tensors
    return (rows, counts, weight, weight.new_zeros(weight.shape[:2]) if ctx.has_bias else None), ()


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_rows, grad_weight, grad_bias = expert_linear_backward(grad, *ctx.saved_tensors, ctx.has_bias)
    return grad_rows, None, grad_weight, grad_bias if ctx.has_bias else None


def _split(ctx: Any, grad: Tensor) -> tuple[tuple[Tensor | None, ...], Compute]:
    rows, counts, weight = ctx.saved_tensors
    backend = select(rows.device.type)
    grad_rows, compute = backend.expert_linear_backward_split(grad, rows, counts, weight, ctx.has_bias)
    return (grad_rows, None, None, None), compute


differentiate(
    expert_linear,
    setup=_setup,
    backward=_differentiate,
    composition=_compose,
    saved_inputs=_saved_inputs,
    weights=("weight", "bias"),
    split=_split,
)

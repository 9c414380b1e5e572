"""`expert_mlp`: every local expert's feed-forward over the rows that it received."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS, PARAMETERS
from moec.passes.ir.operator_schema import WAYS, schema_of
from moec.passes.ir.row_table import table_length
from moec.runtime.backends import select
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate
from moec.runtime.weight_queue import Compute

MATRICES = ("up", "down", "up_bias", "down_bias")
"""The arguments that are parameters."""
NUM_ATTRIBUTES = 4
"""The last arguments are attributes, not tensors: activation, clamp, alpha and ways."""


def check_expert_mlp(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> None:
    """Raises `RuntimeError` for arguments that `expert_mlp` does not take."""
    check_activation("expert_mlp", activation, clamp, alpha)
    check(
        rows.dim() == 2 and counts.dim() == 2 and up.dim() == 4 and down.dim() == 3,
        lambda: (
            "moec::expert_mlp: rows must be [R, D], counts [sources, E], up [E, G, F, D] and down [E, D, F], not "
            f"{list(rows.shape)}, {list(counts.shape)}, {list(up.shape)} and {list(down.shape)}"
        ),
    )
    experts, factor, hidden, dim = up.shape
    check(
        factor == ACTIVATIONS[activation].parts
        and down.shape == (experts, dim, hidden)
        and counts.shape[1] == experts
        and rows.shape[1] == dim,
        lambda: (
            f"moec::expert_mlp: up {list(up.shape)} does not fit {activation}, rows {list(rows.shape)}, "
            f"counts {list(counts.shape)} and down {list(down.shape)}"
        ),
    )
    check(
        rows.dtype == up.dtype == down.dtype,
        lambda: (
            f"moec::expert_mlp: rows, up and down must share a dtype, not {rows.dtype}, {up.dtype} and {down.dtype}"
        ),
    )
    check_biases("expert_mlp", up, down, up_bias, down_bias)
    if weights is not None:
        check(
            weights.dim() == 1 and weights.dtype in (torch.float32, torch.float64),
            lambda: (
                "moec::expert_mlp: weights must be [R] in float32 or float64, not "
                f"{list(weights.shape)} in {weights.dtype}"
            ),
        )
        check(
            weights.shape[0] == rows.shape[0],
            lambda: f"moec::expert_mlp: {weights.shape[0]} weights for {rows.shape[0]} rows",
        )


def check_activation(name: str, activation: str, *parameters: float | None) -> None:
    """Requires a word of `ACTIVATIONS`, with positive parameters only where the activation has them."""
    check(
        activation in ACTIVATIONS,
        lambda: f"moec::{name}: activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}",
    )
    stated = [parameter for parameter in parameters if parameter is not None]
    check(
        not stated or bool(ACTIVATIONS[activation].parameters), lambda: f"moec::{name}: {activation} has no parameters"
    )
    check(
        all(0 < parameter < math.inf for parameter in stated),
        lambda: f"moec::{name}: {' and '.join(PARAMETERS)} must be positive and finite, not {stated}",
    )


def check_biases(name: str, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None) -> None:
    """Requires both biases or none, of shapes [E, G, F] and [E, D] for up [E, G, F, D] and down, and of up's dtype."""
    check(
        (up_bias is None) == (down_bias is None),
        lambda: f"moec::{name}: up and down must both have biases, or none",
    )
    if up_bias is not None and down_bias is not None:
        check(
            up_bias.shape == up.shape[:3]
            and down_bias.shape == down.shape[:2]
            and up_bias.dtype == down_bias.dtype == up.dtype,
            lambda: (
                f"moec::{name}: biases must be [E, G, F] and [E, D] in the dtype of up {list(up.shape)}, {up.dtype}, "
                f"not {list(up_bias.shape)}, {up_bias.dtype} and {list(down_bias.shape)}, {down_bias.dtype}"
            ),
        )


def _fake_expert_mlp(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *attributes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = rows.shape[0]
    table = counts.new_empty(table_length(num_rows, up.shape[0]), dtype=torch.int32)
    return rows.new_empty(rows.shape), rows.new_empty((num_rows, *up.shape[1:3])), table


expert_mlp = define(
    schema_of(o.ExpertMlp),
    fake=_fake_expert_mlp,
    check=check_expert_mlp,
)
"""`activation(row @ up[e]ᵀ + up_bias[e]) @ down[e]ᵀ + down_bias[e]` for the rows of each expert e, times their weights.

rows [R, D], counts [sources, E] int64, up [E, G, F, D], down [E, D, F], up_bias [E, G, F] and down_bias [E, D] or
neither bias; all but counts of one floating dtype; weights [R] float32 or float64, None for all 1; activation one of
`ACTIVATIONS`, of G parts (the gate first), computed in at least float32; clamp and alpha as in `kind_of`. Rows are
sorted by source, then by expert, as an all-to-all delivers them; sources is 1 without an all-to-all. Gives
  - out [R, D], in the rows' order;
  - hidden [R, G, F], the pre-activation, for backward: not differentiable, its rows in the backend's own order;
  - table int32 (`passes/ir/row_table.py`), each row's place and expert, for backward; a backend may leave it zero.
`ways` says how a device's backend computes each product: the text of a `Ways`.
Raises `RuntimeError` if the counts do not add up to R.
"""


def _check_backward(grad: Tensor, rows: Tensor, hidden: Tensor, table: Tensor, counts: Tensor, *operands: Any) -> None:
    check_expert_mlp(rows, counts, *operands)
    check_table("expert_mlp_backward", table, rows.shape[0], counts.shape[1])


def check_table(name: str, table: Tensor, num_rows: int, num_experts: int) -> None:
    """Requires the table of rows that forward gave."""
    length = table_length(num_rows, num_experts)
    check(
        table.dtype == torch.int32 and table.shape == (length,),
        lambda: f"moec::{name}: table must be int32 [{length}], not {list(table.shape)} in {table.dtype}",
    )


def _fake_expert_mlp_backward(
    grad: Tensor,
    rows: Tensor,
    hidden: Tensor,
    table: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor | None,
    *attributes: Any,
) -> tuple[Tensor, ...]:
    grad_weights = rows.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    return *(t.new_empty(t.shape) for t in (rows, up, down)), *bias_gradients(up, up_bias, down_bias), grad_weights


def bias_gradients(up: Tensor, up_bias: Tensor | None, down_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocates the biases' gradients, of shape [0] without a bias: operators return no optional tensors."""
    grad_up_bias, grad_down_bias = (up.new_empty(0 if bias is None else bias.shape) for bias in (up_bias, down_bias))
    return grad_up_bias, grad_down_bias


expert_mlp_backward = define(
    "expert_mlp_backward(Tensor grad, Tensor rows, Tensor hidden, Tensor table, Tensor counts, Tensor up,"
    " Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor? weights, str activation,"
    f" float? clamp=None, float? alpha=None, {WAYS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_expert_mlp_backward,
    check=_check_backward,
)
"""The gradients of rows, up, down, both biases and weights; of shape [0] for an operand that is None.

The gradient of a row's weight is the inner product of `grad` and the row's output. It equals `grad @ down[e]` times the
activated hidden row (plus `grad` times down_bias), so that forward need not save the output.
"""


def _setup_expert_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, counts, *parameters, weights = inputs[:-NUM_ATTRIBUTES]
    ctx.attributes = inputs[-NUM_ATTRIBUTES:]
    _, hidden, table = output
    ctx.mark_non_differentiable(hidden, table)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, hidden, table, counts, *parameters, weights)


def compose_expert_mlp(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Tensor]:
    """The composition of `expert_mlp`. It computes `hidden` again, because `hidden` depends on the rows."""
    rows, counts, *parameters, weights = inputs[:-NUM_ATTRIBUTES]
    experts, attributes = compositions.experts_of_rows(counts), inputs[-NUM_ATTRIBUTES:-1]
    out = compositions.mlp_by_expert(rows, experts, *parameters, *attributes)
    return (out if weights is None else (compositions.wide(out) * weights[:, None]).to(out.dtype),)


def _saved_inputs(ctx: Any, *_: Any) -> tuple[tuple[Any, ...], tuple[()]]:
    rows, _, _, *operands = ctx.saved_tensors
    return (rows, *operands, *ctx.attributes), ()


def _differentiate_expert_mlp(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (7 + NUM_ATTRIBUTES)
    *saved, weights = ctx.saved_tensors
    grad_rows, grad_up, grad_down, *optional = expert_mlp_backward(grad, *saved, weights, *ctx.attributes)
    grad_up_bias, grad_down_bias, grad_weights = optional_gradients(optional, (*saved[-2:], weights))
    return grad_rows, None, grad_up, grad_down, grad_up_bias, grad_down_bias, grad_weights, *(None,) * NUM_ATTRIBUTES


def expert_mlp_split(grad: Tensor, rows: Tensor, *operands: Any) -> tuple[tuple[Tensor | None, ...], Compute]:
    """The gradients of `expert_mlp`'s arguments, for those of `expert_mlp_backward`: None for `MATRICES`, of which
    the function gives the gradients."""
    *_, weights = operands[:-NUM_ATTRIBUTES]
    backend = select(rows.device.type)
    grad_rows, grad_weights, compute = backend.expert_mlp_backward_split(grad, rows, *operands)
    of_weights = None if weights is None else grad_weights
    return (grad_rows, *(None,) * 5, of_weights, *(None,) * NUM_ATTRIBUTES), compute


def _split(ctx: Any, grad: Tensor, *_: None) -> tuple[tuple[Tensor | None, ...], Compute]:
    return expert_mlp_split(grad, *ctx.saved_tensors, *ctx.attributes)


def optional_gradients(gradients: Sequence[Tensor], operands: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of optional operands, such as biases; None for an operand that is None."""
    return tuple(None if operand is None else gradient for gradient, operand in zip(gradients, operands, strict=True))


differentiate(
    expert_mlp,
    setup=_setup_expert_mlp,
    backward=_differentiate_expert_mlp,
    composition=compose_expert_mlp,
    saved_inputs=_saved_inputs,
    weights=MATRICES,
    split=_split,
)

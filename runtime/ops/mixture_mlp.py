"""`mixture_mlp`: a whole mixture whose rows stay on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.operator_schema import WAYS, schema_of
from moec.passes.ir.row_table import table_length
from moec.runtime.backends import select
from moec.runtime.backends.torch.torch_few import FEW
from moec.runtime.backends.torch.torch_few import mixture_of_few as of_few_tokens
from moec.runtime.ops import compositions
from moec.runtime.ops.expert_mlp import (
    MATRICES,
    NUM_ATTRIBUTES,
    bias_gradients,
    check_activation,
    check_biases,
    check_table,
    optional_gradients,
)
from moec.runtime.ops.registry import check, define, differentiate
from moec.runtime.weight_queue import Compute


def check_mixture_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> None:
    """Raises `RuntimeError` for arguments that `mixture_mlp` does not take."""
    check_activation("mixture_mlp", activation, clamp, alpha)
    check(
        x.dim() == 3 and experts.dim() == 3 and x.shape[:2] == experts.shape[:2] and experts.shape == weights.shape,
        lambda: (
            "moec::mixture_mlp: x must be [B, S, D], experts and weights [B, S, k], not "
            f"{list(x.shape)}, {list(experts.shape)} and {list(weights.shape)}"
        ),
    )
    check(
        up.dim() == 4
        and up.shape[1] == ACTIVATIONS[activation].parts
        and down.shape == (up.shape[0], up.shape[3], up.shape[2])
        and x.shape[2] == up.shape[3],
        lambda: (
            "moec::mixture_mlp: up must be [E, G, F, D] and down [E, D, F], as wide as x, with the G of "
            f"{activation}; not {list(up.shape)} and {list(down.shape)} for x {list(x.shape)}"
        ),
    )
    check(experts.dtype == torch.int64, lambda: f"moec::mixture_mlp: experts must be int64, not {experts.dtype}")
    check(
        weights.dtype in (torch.float32, torch.float64),
        lambda: f"moec::mixture_mlp: weights must be float32 or float64, not {weights.dtype}",
    )
    check(
        x.dtype == up.dtype == down.dtype,
        lambda: f"moec::mixture_mlp: x, up and down must share a dtype, not {x.dtype}, {up.dtype} and {down.dtype}",
    )
    check_biases("mixture_mlp", up, down, up_bias, down_bias)


def _fake_mixture_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *attributes: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        experts.new_empty((1, up.shape[0])),
        x.new_empty((experts.numel(), *up.shape[1:3])),
        experts.new_empty(experts.shape),
        experts.new_empty(table_length(experts.numel(), up.shape[0]), dtype=torch.int32),
    )


mixture_mlp = define(
    schema_of(o.MixtureMlp),
    fake=_fake_mixture_mlp,
    check=check_mixture_mlp,
)
"""mixed[t] = Σⱼ weights[t, j] · f_e(x[t]), e = experts[t, j], with f as `expert_mlp`'s; nothing for e = −1.

x [B, S, D], up [E, G, F, D], down [E, D, F], up_bias [E, G, F] and down_bias [E, D] (or neither) of one floating
dtype, experts [B, S, k] int64, weights [B, S, k] float32 or float64. Gives
  - mixed [B, S, D], summed in at least float32;
  - counts [1, E] int64: how many choices each expert got;
  - hidden [B·S·k, G, F] and positions [B, S, k] int64, for backward: the pre-activations sorted by expert, and each
    choice's row of hidden (−1 for a choice of −1; such choices leave as many last rows of hidden undefined);
  - table int32 (`passes/ir/row_table.py`), each row's choice and expert, for backward; a backend may leave it zero.
`ways` says how a device's backend computes each product: the text of a `Ways`.
Computes `permute`, `expert_mlp` and `combine` without saved activations of size B·S·k·D.
Raises `RuntimeError` on CPU if an expert index is out of range.
"""


def _check_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    table: Tensor,
    *operands: Any,
) -> None:
    check(grad.shape == x.shape, lambda: f"moec::mixture_mlp_backward: grad must be {list(x.shape)}")
    check_mixture_mlp(x, positions, *operands)
    check_table("mixture_mlp_backward", table, positions.numel(), counts.shape[1])


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    table: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *attributes: Any,
) -> tuple[Tensor, ...]:
    return *(t.new_empty(t.shape) for t in (x, weights, up, down)), *bias_gradients(up, up_bias, down_bias)


mixture_mlp_backward = define(
    "mixture_mlp_backward(Tensor grad, Tensor x, Tensor hidden, Tensor counts, Tensor positions, Tensor table,"
    " Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, str activation,"
    f" float? clamp=None, float? alpha=None, {WAYS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    check=_check_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, *parameters = inputs[:-NUM_ATTRIBUTES]
    ctx.attributes = inputs[-NUM_ATTRIBUTES:]
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    counts, hidden, *tables = saved
    ctx.save_for_backward(x, hidden, counts, *tables, weights, *parameters)


def compose_mixture_mlp(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Tensor]:
    """The composition of `mixture_mlp`. It computes `hidden` again, because `hidden` depends on x."""
    return (compositions.mixture(*inputs[:-1]),)


def _saved(ctx: Any, *_: Any) -> tuple[tuple[Any, ...], tuple[()]]:
    x, _, counts, positions, _, *operands = ctx.saved_tensors
    experts = compositions.experts_of_rows(counts)
    return (x, torch.cat([experts, experts.new_tensor([-1])])[positions], *operands, *ctx.attributes), ()


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (7 + NUM_ATTRIBUTES)
    saved = ctx.saved_tensors
    grad_x, *grads = mixture_mlp_backward(grad, *saved, *ctx.attributes)
    return grad_x, None, *grads[:3], *optional_gradients(grads[3:], saved[-2:]), *(None,) * NUM_ATTRIBUTES


def mixture_mlp_split(grad: Tensor, x: Tensor, *operands: Any) -> tuple[tuple[Tensor | None, ...], Compute]:
    """The gradients of `mixture_mlp`'s arguments, for those of `mixture_mlp_backward`: None for `MATRICES`, of which
    the function gives the gradients."""
    grad_x, grad_weights, compute = select(x.device.type).mixture_mlp_backward_split(grad, x, *operands)
    return (grad_x, None, grad_weights, *(None,) * (4 + NUM_ATTRIBUTES)), compute


def _split(ctx: Any, grad: Tensor, *_: None) -> tuple[tuple[Tensor | None, ...], Compute]:
    return mixture_mlp_split(grad, *ctx.saved_tensors, *ctx.attributes)


differentiate(
    mixture_mlp,
    setup=_setup,
    backward=_differentiate,
    composition=compose_mixture_mlp,
    saved_inputs=_saved,
    weights=MATRICES,
    split=_split,
)


def _mixture_of_few(x: Tensor, experts: Tensor, *operands: Any) -> Tensor:
    if experts.device.type == "cpu" and experts.numel() <= FEW:
        return of_few_tokens(x, experts, *operands)
    mixed: Tensor = select(x.device.type).mixture_mlp(x, experts, *operands)[0]
    return mixed


mixture_of_few = define(
    schema_of(o.MixtureMlp, "mixture_of_few", saved=False).partition(" -> ")[0] + " -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    check=check_mixture_mlp,
    kernel=_mixture_of_few,
)
"""The first result of `mixture_mlp` with its arguments, for generation: without a gradient, and in less time where
there are few tokens on CPU."""

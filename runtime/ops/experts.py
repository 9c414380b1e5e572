"""`expert_mlp`: every local expert's feed-forward over the rows it was sent."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moec.runtime.ops.registry import check, define, differentiate

FACTORS = {"swiglu": 2, "geglu": 2, "gelu": 1, "relu": 1, "relu2": 1}
"""G, the factor of F by which the up projection is wider, for each activation."""


def _check_expert_mlp(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, activation: str) -> None:
    check(
        activation in FACTORS,
        lambda: f"moec::expert_mlp: activation must be one of {', '.join(FACTORS)}, not {activation!r}",
    )
    check(
        rows.dim() == 2 and counts.dim() == 2 and up.dim() == 4 and down.dim() == 3,
        lambda: (
            "moec::expert_mlp: rows must be [R, D], counts [sources, E], up [E, G, F, D] and down [E, D, F], not "
            f"{list(rows.shape)}, {list(counts.shape)}, {list(up.shape)} and {list(down.shape)}"
        ),
    )
    experts, factor, hidden, dim = up.shape
    check(
        factor == FACTORS[activation]
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


def _fake_expert_mlp(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty((rows.shape[0], *up.shape[1:3]))


expert_mlp = define(
    "expert_mlp(Tensor rows, Tensor counts, Tensor up, Tensor down, str activation) -> (Tensor out, Tensor hidden)",
    fake=_fake_expert_mlp,
    check=_check_expert_mlp,
)
"""`activation(row @ up[e]ᵀ) @ down[e]ᵀ` for the rows of each expert e.

rows [R, D], counts [sources, E] int64, up [E, G, F, D] and down [E, D, F], all but counts of one floating dtype;
activation "swiglu" or "geglu" (gate first, G = 2), "gelu", "relu" or its square "relu2" (G = 1), gelu being the exact
one, computed in at least float32. Rows lie source-major, then by expert, which is how an all-to-all delivers them;
sources is 1 where there was none. Gives
  - out [R, D], in the rows' order;
  - hidden [R, G, F], the pre-activation, for backward: not differentiable, its rows in the backend's own order.
Raises `RuntimeError` if the counts do not add up to R.
"""


def _check_expert_mlp_backward(
    grad: Tensor, rows: Tensor, hidden: Tensor, counts: Tensor, up: Tensor, down: Tensor, activation: str
) -> None:
    _check_expert_mlp(rows, counts, up, down, activation)


def _fake_expert_mlp_backward(
    grad: Tensor, rows: Tensor, hidden: Tensor, counts: Tensor, up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(rows.shape), up.new_empty(up.shape), down.new_empty(down.shape)


expert_mlp_backward = define(
    "expert_mlp_backward(Tensor grad, Tensor rows, Tensor hidden, Tensor counts, Tensor up, Tensor down,"
    " str activation) -> (Tensor, Tensor, Tensor)",
    fake=_fake_expert_mlp_backward,
    check=_check_expert_mlp_backward,
)


def _setup_expert_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, counts, up, down, ctx.activation = inputs
    _, hidden = output
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, hidden, counts, up, down)


def _differentiate_expert_mlp(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    rows, hidden, counts, up, down = ctx.saved_tensors
    grad_rows, grad_up, grad_down = expert_mlp_backward(grad, rows, hidden, counts, up, down, ctx.activation)
    return grad_rows, None, grad_up, grad_down, None


differentiate(expert_mlp, setup=_setup_expert_mlp, backward=_differentiate_expert_mlp)

"""`expert_mlp` and `mixture_mlp` without their pre-activations: backward computes these again (`recompute = experts`).

The rows that the experts read are kept, so that no row is sent again; so are the choices.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops.expert_mlp import (
    MATRICES,
    NUM_ATTRIBUTES,
    check_expert_mlp,
    compose_expert_mlp,
    expert_mlp,
    expert_mlp_backward,
    expert_mlp_split,
    optional_gradients,
)
from moec.runtime.ops.mixture_mlp import (
    check_mixture_mlp,
    compose_mixture_mlp,
    mixture_mlp,
    mixture_mlp_backward,
    mixture_mlp_split,
)
from moec.runtime.ops.registry import define, differentiate


def _saved_inputs(ctx: Any, *_: Any) -> tuple[tuple[Any, ...], tuple[()]]:
    return (*ctx.saved_tensors, *ctx.attributes), ()


# ---- expert_mlp ----------------------------------------------------------------------------------------


def _expert_mlp(*arguments: Any) -> Tensor:
    out: Tensor = expert_mlp(*arguments)[0]
    return out


expert_mlp_recomputed = define(
    schema_of(o.ExpertMlp, "expert_mlp_recomputed", saved=False),
    fake=lambda rows, *rest: rows.new_empty(rows.shape),
    check=check_expert_mlp,
    kernel=_expert_mlp,
)
"""The first result of `expert_mlp`, of the same arguments; its backward runs `expert_mlp` again."""


def _setup_expert_mlp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.attributes = inputs[:-NUM_ATTRIBUTES], inputs[-NUM_ATTRIBUTES:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate_expert_mlp(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (7 + NUM_ATTRIBUTES)
    rows, counts, up, down, *operands = ctx.saved_tensors
    saved = expert_mlp(rows, counts, up, down, *operands, *ctx.attributes)[1:]  # its first result is freed
    gradients = expert_mlp_backward(grad, rows, *saved, counts, up, down, *operands, *ctx.attributes)
    return gradients[0], None, *gradients[1:3], *optional_gradients(gradients[3:], operands), *(None,) * NUM_ATTRIBUTES


def _expert_mlp_split(ctx: Any, grad: Tensor) -> Any:
    rows, counts, *operands = ctx.saved_tensors
    saved = expert_mlp(rows, counts, *operands, *ctx.attributes)[1:]
    return expert_mlp_split(grad, rows, *saved, counts, *operands, *ctx.attributes)


differentiate(
    expert_mlp_recomputed,
    setup=_setup_expert_mlp,
    backward=_differentiate_expert_mlp,
    composition=compose_expert_mlp,
    saved_inputs=_saved_inputs,
    weights=MATRICES,
    split=_expert_mlp_split,
)

# ---- mixture_mlp ---------------------------------------------------------------------------------------


def _mixture_mlp(*arguments: Any) -> tuple[Tensor, Tensor]:
    mixed, counts, *_ = mixture_mlp(*arguments)
    return mixed, counts


def _fake_mixture_mlp(x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), experts.new_empty((1, up.shape[0]))


mixture_mlp_recomputed = define(
    schema_of(o.MixtureMlp, "mixture_mlp_recomputed", saved=False),
    fake=_fake_mixture_mlp,
    check=check_mixture_mlp,
    kernel=_mixture_mlp,
)
"""The first two results of `mixture_mlp`, of the same arguments; its backward runs `mixture_mlp` again."""


def _setup_mixture_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.attributes = inputs[:-NUM_ATTRIBUTES], inputs[-NUM_ATTRIBUTES:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate_mixture_mlp(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (7 + NUM_ATTRIBUTES)
    operands = ctx.saved_tensors
    grad_x, *gradients = mixture_mlp_backward(grad, *_run_again(*operands, *ctx.attributes))
    return grad_x, None, *gradients[:3], *optional_gradients(gradients[3:], operands[-2:]), *(None,) * NUM_ATTRIBUTES


def _run_again(x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The operands of `mixture_mlp_backward`."""
    counts, hidden, *tables = mixture_mlp(x, experts, weights, *rest)[1:]
    return x, hidden, counts, *tables, weights, *rest


def _mixture_mlp_split(ctx: Any, grad: Tensor, _: None) -> Any:
    return mixture_mlp_split(grad, *_run_again(*ctx.saved_tensors, *ctx.attributes))


differentiate(
    mixture_mlp_recomputed,
    setup=_setup_mixture_mlp,
    backward=_differentiate_mixture_mlp,
    composition=compose_mixture_mlp,
    saved_inputs=_saved_inputs,
    weights=MATRICES,
    split=_mixture_mlp_split,
)

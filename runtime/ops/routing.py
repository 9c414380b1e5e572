"""`route`, from router logits to weighted choices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir.operator_schema import schema_of
from moec.passes.ir.ops.gating.gate_ops import Route
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate
from moec.runtime.unscored import note

SCORES = ("softmax", "sigmoid")
ORDERS = ("before", "after")
GROUP_SCORES = ("top2_sum", "max")

# ---- route -------------------------------------------------------------------------------------------


def _check_route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    order: str,
    normalize: bool,
    scale: float = 1.0,
    groups: int = 1,
    keep_groups: int = 1,
    group_score: str = GROUP_SCORES[0],
) -> None:
    check(logits.dim() == 3, lambda: f"moec::route: logits must be [B, S, E], not {list(logits.shape)}")
    check(
        logits.dtype in (torch.float32, torch.float64),
        lambda: f"moec::route: logits must be float32 or float64, not {logits.dtype}",
    )
    check(
        1 <= k <= logits.shape[-1],
        lambda: f"moec::route: k must be between 1 and the {logits.shape[-1]} experts, not {k}",
    )
    check(
        bias is None or (bias.shape == logits.shape[-1:] and bias.dtype in (torch.float32, torch.float64)),
        lambda: "moec::route: bias must be a float32 or float64 [E]",
    )
    check(order in ORDERS, lambda: f"moec::route: order must be one of {', '.join(ORDERS)}, not {order!r}")
    check(0 < scale < math.inf, lambda: f"moec::route: scale must be positive and finite, not {scale}")
    check(
        groups >= 1 and logits.shape[-1] % groups == 0,
        lambda: f"moec::route: {logits.shape[-1]} experts do not make {groups} equal groups",
    )
    pool = keep_groups * (logits.shape[-1] // groups)
    check(
        k <= pool <= logits.shape[-1],
        lambda: f"moec::route: a token cannot choose {k} experts from {keep_groups} of {groups} groups",
    )
    known = ", ".join(GROUP_SCORES)
    check(group_score in GROUP_SCORES, lambda: f"moec::route: group_score must be one of {known}, not {group_score!r}")
    check(score in SCORES, lambda: f"moec::route: score must be one of {', '.join(SCORES)}, not {score!r}")


def _fake_route(logits: Tensor, bias: Tensor | None, k: int, *attributes: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(logits.shape), logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


route = define(
    schema_of(Route),
    fake=_fake_route,
    check=_check_route,
)
"""Choose k experts a token (Shazeer et al. 2017; Mixtral, arXiv 2401.04088, section 2.1).

logits [B, S, E], float32 or float64. Gives, in the logits' dtype,
  - probabilities [B, S, E], for balance losses: the scores of all experts, summing to 1;
  - weights [B, S, k], best choice first: `score` ("softmax" or "sigmoid") of all experts, the k best kept; where
    `order` is "after", the k best logits are kept and only those are scored. `normalize` divides by the k scores' sum,
    and `scale` multiplies what is left;
  - experts [B, S, k], int64. Equal scores go to the lower index.
With `bias` [E] the k experts with the largest score + bias are chosen, whatever `order` is; weights are of scores
without it, in the order of the choices, and no gradient flows to it (Wang et al. 2024, arXiv 2408.15664).
With `groups` above 1 experts are in groups of neighbours, and those of the `keep_groups` best groups alone are chosen
(DeepSeek-V3, section 2.1.2). A group's score is the sum of its two best scores ("top2_sum"; of one expert: its score)
or its best ("max"), of the scores that choose, with the bias. Equal groups: the lower one.
Gradients flow from probabilities and weights. Where a token's scores are NaN (a logit is NaN, or infinite so that no
score is left), its probabilities or weights are NaN, and its k experts are still in range: a model's forward pass
reports the token at its end (`moec.runtime.unscored`). Outside of a model `route` raises `FloatingPointError` on
CPU; on other devices the check would cost a synchronisation.
"""


def _fake_route_backward(logits: Tensor, *options: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _check_route_backward(
    logits: Tensor,
    grad_probabilities: Tensor | None,
    grad_weights: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    score: str,
    order: str,
    normalize: bool,
    scale: float = 1.0,
) -> None:
    _check_route(logits, None, experts.shape[-1], score, order, normalize, scale)


route_backward = define(
    "route_backward(Tensor logits, Tensor? grad_probabilities, Tensor? grad_weights, Tensor weights, Tensor experts,"
    " str score, str order, bool normalize, float scale=1.0) -> Tensor",
    fake=_fake_route_backward,
    check=_check_route_backward,
)


def _setup_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, *attributes = inputs
    ctx.attributes = attributes[:4]
    _, weights, experts = output
    ctx.mark_non_differentiable(experts)
    ctx.set_materialize_grads(False)
    # The choice is saved: recomputed, a tie could fall the other way.
    ctx.save_for_backward(logits, weights, experts)


def _saved_inputs(ctx: Any, *_: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    logits, weights, experts = ctx.saved_tensors
    return (logits, None, None, *ctx.attributes), (None, weights, experts)


def _differentiate_route(
    ctx: Any, grad_probabilities: Tensor | None, grad_weights: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if grad_probabilities is None and grad_weights is None:
        return (None,) * 10
    logits, weights, experts = ctx.saved_tensors
    grad = route_backward(logits, grad_probabilities, grad_weights, weights, experts, *ctx.attributes)
    return grad, *(None,) * 9


differentiate(
    route,
    setup=_setup_route,
    backward=_differentiate_route,
    composition=lambda inputs, outputs: compositions.routed(inputs[0], outputs[2], *inputs[3:7]),
    saved_inputs=_saved_inputs,
)


# ---- note_scores -------------------------------------------------------------------------------------


def _check_note(logits: Tensor) -> None:
    check(
        logits.dim() == 3 and logits.is_floating_point() and logits.shape[-1] > 0,
        lambda: f"moec::note_scores: logits must be floating [B, S, n], not {logits.dtype} {list(logits.shape)}",
    )


def _note_scores(logits: Tensor) -> Tensor:
    note(logits)
    return logits.clone(memory_format=torch.contiguous_format)


note_scores = define(
    "note_scores(Tensor logits) -> Tensor",
    fake=lambda logits: logits.new_empty(logits.shape),
    check=_check_note,
    kernel=_note_scores,
)
"""A copy of router logits [B, S, n] of any floating dtype, for gates without `route`.

Notes the tokens without scores, which the model's forward pass reports at its end; outside of a model it does nothing.
"""

differentiate(
    note_scores,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, grad: grad,
    composition=lambda inputs, outputs: (inputs[0].clone(),),
)

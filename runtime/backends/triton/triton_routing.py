"""Routing by rendered kernels, with all options of `route`: logits read once, ties to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels.shapes import RouteShape
from moec.runtime.backends.torch import torch_routing
from moec.runtime.backends.triton.triton_launch import dtype_name, kernels_of, too_many
from moec.runtime.unscored import note_or_refuse


def _shape(
    logits: Tensor,
    k: int,
    score: str,
    order: str,
    normalize: bool,
    scale: float,
    groups: int = 1,
    keep_groups: int = 1,
    group_score: str = "top2_sum",
    biased: bool = False,
) -> RouteShape:
    return RouteShape(
        experts=logits.shape[-1],
        k=k,
        score=score,
        after=order == "after",
        normalize=normalize,
        scale=scale,
        groups=groups,
        keep_groups=keep_groups,
        group_score=group_score,
        biased=biased,
        dtype=dtype_name(logits),
    )


def route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    order: str,
    normalize: bool,
    scale: float = 1.0,
    groups: int = 1,
    keep_groups: int = 1,
    group_score: str = "top2_sum",
) -> tuple[Tensor, Tensor, Tensor]:
    options = (score, order, normalize, scale, groups, keep_groups, group_score)
    if too_many(logits.shape[-1]):
        return torch_routing.route(logits, bias, k, *options)
    logits = logits.contiguous()
    probabilities, weights = torch.empty_like(logits), logits.new_empty((*logits.shape[:-1], k))
    experts = torch.empty_like(weights, dtype=torch.int64)
    num_tokens = weights.numel() // k
    if num_tokens:
        kernels = kernels_of(_shape(logits, k, *options, biased=bias is not None), logits)
        inputs = (logits,) if bias is None else (logits, bias.to(logits.dtype).contiguous())
        kernels.launch("route", kernels.blocks(num_tokens), *inputs, probabilities, weights, experts, num_tokens)
    note_or_refuse(probabilities, weights)
    return probabilities, weights, experts


def route_backward(
    logits: Tensor,
    grad_probabilities: Tensor | None,
    grad_weights: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    score: str,
    order: str,
    normalize: bool,
    scale: float = 1.0,
) -> Tensor:
    if too_many(logits.shape[-1]):
        return torch_routing.route_backward(
            logits, grad_probabilities, grad_weights, weights, experts, score, order, normalize, scale
        )
    logits = logits.contiguous()
    grad = torch.empty_like(logits)
    k = experts.shape[-1]
    num_tokens = experts.numel() // k
    if num_tokens:
        kernels = kernels_of(_shape(logits, k, score, order, normalize, scale), logits)
        kernels.launch(
            "route_backward",
            kernels.blocks(num_tokens),
            logits,
            logits if grad_probabilities is None else grad_probabilities.contiguous(),
            logits if grad_weights is None else grad_weights.contiguous(),
            weights.contiguous(),
            experts.contiguous(),
            grad,
            num_tokens,
            OF_PROBABILITIES=grad_probabilities is not None,
            OF_WEIGHTS=grad_weights is not None,
        )
    return grad

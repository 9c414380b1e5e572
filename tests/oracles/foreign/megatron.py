"""Megatron-LM's router. Source: megatron-core 0.16.1, megatron/core/transformer/moe/moe_utils.py and router.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from oracles.foreign.routing import Routing, in_best_groups, mask_of, spread
from torch import Tensor


def choose(
    logits: Tensor,
    topk: int,
    *,
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`topk_routing_with_score_function`: weights [T, E], and which experts are chosen."""

    def best(scores: Tensor) -> Tensor:
        if group_topk:  # `group_limited_topk`: a group counts its topk // group_topk best experts
            assert num_groups is not None
            scores = in_best_groups(scores, num_groups, group_topk, topk // group_topk)
        return scores.topk(topk, -1).indices

    if score_function == "sigmoid":
        scores = logits.sigmoid()
        chosen = best(scores if expert_bias is None else scores + expert_bias)
        weights = scores.gather(-1, chosen)
        if topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    elif pre_softmax:
        scores = logits.softmax(-1)
        chosen = best(scores)
        weights = scores.gather(-1, chosen)
    else:
        chosen = best(logits)
        weights = logits.gather(-1, chosen).softmax(-1)
    if scaling_factor:
        weights = weights * scaling_factor
    return spread(weights, chosen, logits.shape[-1]), mask_of(chosen, logits.shape[-1])


def capacity(tokens: int, experts: int, factor: float) -> int:
    """`get_capacity`, in Python's floats; `tokens` are tokens times k."""
    return math.ceil((tokens / experts) * factor)


def drop(weights: Tensor, chosen: Tensor, topk: int, factor: float, policy: str) -> Tensor:
    """`apply_router_token_dropping`: the weights, 0 where a choice has no place. It divides none anew.

    `position` takes `torch.topk` of zeros and ones, which leaves open which of equal ones it takes: on a CPU any, in
    CUDA's kernel (`gatherTopK`, by its source) the first ones, as here.
    """
    tokens, experts = weights.shape
    places = capacity(tokens * topk, experts, factor)
    if places > tokens:
        return weights
    if policy == "probs":
        kept = torch.zeros_like(chosen).scatter(0, weights.topk(places, 0).indices, True)
    else:
        kept = chosen.cumsum(0) <= places
    return weights * kept


def balance_scores(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """`compute_routing_scores_for_aux_loss`: scores of sum 1, and the plain top k, without biases and groups."""
    if score_function == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid() / (logits.sigmoid().sum(-1, keepdim=True) + 1e-20)
    return scores, mask_of(scores.topk(topk, -1).indices, logits.shape[-1])


def switch_loss(scores: Tensor, counts: Tensor, topk: int, tokens: Tensor | float) -> Tensor:
    """`switch_load_balancing_loss_func` without its coefficient; scores and counts [..., E] are sums over tokens."""
    return (scores * counts).sum() * scores.shape[-1] / (topk * tokens * tokens)


def aux_loss(logits: Tensor, topk: int, score_function: str = "softmax", real: Tensor | None = None) -> Tensor:
    """`TopKRouter._apply_aux_loss`, of a micro-batch on the ranks of a tp and cp group."""
    scores, chosen = balance_scores(logits, topk, score_function)
    if real is not None:
        scores, chosen = scores * real[:, None], chosen & real[:, None]
    tokens = len(logits) if real is None else chosen.sum() / topk
    return switch_loss(scores.sum(0), chosen.sum(0), topk, tokens)


def seq_aux_loss(
    logits: Tensor, sequences: int, topk: int, score_function: str = "softmax", real: Tensor | None = None
) -> Tensor:
    """`TopKRouter._apply_seq_aux_loss`: tokens of a sequence are neighbours here; with padding it divides by the mean
    number of real tokens of a sequence."""
    scores, chosen = balance_scores(logits, topk, score_function)
    if real is not None:
        scores, chosen = scores * real[:, None], chosen & real[:, None]
    tokens = len(logits) / sequences if real is None else chosen.sum() / (topk * sequences)
    by_sequence = [each.unflatten(0, (sequences, -1)).sum(1) for each in (scores, chosen)]
    return switch_loss(*by_sequence, topk, tokens) / sequences


def global_aux_loss(logits: Tensor, earlier: list[Tensor], topk: int) -> Tensor:
    """`TopKRouter._apply_global_aux_loss`: counts are means over the micro-batches of a step so far."""
    scores, chosen = balance_scores(logits, topk, "softmax")
    counts = [balance_scores(each, topk, "softmax")[1].sum(0) for each in earlier]
    mean = torch.stack([*counts, chosen.sum(0)]).to(scores).mean(0)
    return switch_loss(scores.sum(0), mean, topk, len(logits))


def z_loss(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """`z_loss_func` without its coefficient."""
    squares = logits.logsumexp(-1).square()
    return squares.mean() if real is None else (squares * real).sum() / real.sum().clamp(min=1)


def sinkhorn(logits: Tensor, topk: int, *, training: bool) -> tuple[Tensor, Tensor]:
    """`TopKRouter.sinkhorn_load_balancing`: Sinkhorn's iteration chooses in training; it never weighs."""
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    choosing = normalized(logits.exp()) if training else scores
    chosen = mask_of(choosing.topk(topk, -1).indices, logits.shape[-1])
    return scores * chosen, chosen


def normalized(cost: Tensor, tol: float = 1e-4, eps: float = 1e-8) -> Tensor:
    """`sinkhorn`, after its exponential."""
    tokens, experts = cost.shape
    columns, moved = torch.ones(experts, dtype=cost.dtype), math.inf
    while moved > tol:
        rows = 1 / tokens / ((columns * cost).sum(1) + eps)
        before, columns = columns, 1 / experts / ((rows[:, None] * cost).sum(0) + eps)
        moved = float((before - columns).abs().mean())
    return columns * cost * rows[:, None]


def updated_bias(counts: Tensor, bias: Tensor, rate: float) -> Tensor:
    """`get_updated_expert_bias`: `counts` are those of all ranks, after drops (`TopKRouter._apply_expert_bias`)."""
    return bias + rate * (counts.double().mean() - counts).sign()


def route(
    logits: Tensor,
    topk: int,
    *,
    capacity_factor: float | None = None,
    drop_policy: str = "probs",
    load_balancing: str = "none",
    sequences: int = 1,
    z: float = 0.0,
    training: bool = True,
    real: Tensor | None = None,
    **options: Any,
) -> Routing:
    """`TopKRouter.routing` with a coefficient of 1 for its balance term. `real` [T] are tokens that are no padding:
    only losses know of them."""
    if load_balancing == "sinkhorn":
        weights, chosen = sinkhorn(logits, topk, training=training)
    else:
        weights, chosen = choose(logits, topk, **options)
    if capacity_factor is not None:
        weights = drop(weights, chosen, topk, capacity_factor, drop_policy)
    score_function = options.get("score_function", "softmax")
    losses = []
    if load_balancing == "aux_loss":
        losses.append(aux_loss(logits, topk, score_function, real))
    elif load_balancing == "seq_aux_loss":
        losses.append(seq_aux_loss(logits, sequences, topk, score_function, real))
    elif load_balancing == "global_aux_loss":
        losses.append(global_aux_loss(logits, [], topk))
    if z:
        losses.append(z * z_loss(logits, real))
    return Routing(weights, torch.stack(losses).sum() if losses else None)

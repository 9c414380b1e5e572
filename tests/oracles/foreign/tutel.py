"""Tutel's gate. Source: Tutel 0.4 (commit ac0e51b9), tutel/impls/fast_dispatch.py, losses.py and moe_layer.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from oracles.foreign.routing import Routing, queue_places, spread, squared_variation
from torch import Tensor


def gshard_loss(scores: Tensor, first: Tensor) -> Tensor:
    """`losses.gshard_loss`: experts times the sum over experts of mean score and share of first choices."""
    tokens, experts = scores.shape
    shares = F.one_hot(first, experts).sum(0) * (experts / tokens)
    return (scores.sum(0) * shares).sum() / tokens


def load_importance_loss(scores: Tensor, chosen_logits: Tensor, gate_noise: float) -> Tensor:
    """`losses.load_importance_loss`: `scores` are the softmax without noise, of all experts, and the threshold is a
    *logit*, with noise, the token's own k-th: as the code has it."""
    normal = torch.distributions.Normal(0.0, gate_noise / scores.shape[-1])
    load = normal.cdf(scores - chosen_logits[:, -1:]).sum(0)
    return (squared_variation(scores.sum(0)) + squared_variation(load)) / 2


def capacity(tokens: int, experts: int, k: int, factor: float, busiest: int) -> int:
    """`extract_critical`: the part of a token's k choices is rounded up, then its product with the factor *down*."""
    part = -(-tokens // experts)
    if factor > 0:
        return k * int(factor * part)
    return min(busiest, k * int(-factor * part)) if factor < 0 else busiest


def route(
    logits: Tensor,
    k: int,
    *,
    capacity_factor: float = 1.0,
    normalize_gate: bool = True,
    batch_prioritized_routing: bool = False,
    is_gshard_loss: bool = True,
    is_postscore: bool = True,
    gate_noise: float = 0.0,
    normal: Tensor | None = None,
) -> Routing:
    """`MOELayer.forward` and `extract_critical`. `normal` are the noise's standard normal numbers, in training.

    Without `is_postscore` weights multiply what goes into experts: those that give unit vectors have the weight 1.
    """
    tokens, experts = logits.shape
    noisy = logits if normal is None else logits + gate_noise * normal / experts
    scores = noisy.softmax(-1)
    chosen = scores.topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    if normalize_gate and k > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    order = torch.arange(tokens)
    if batch_prioritized_routing:
        order = (-scores.max(-1).values).argsort()
    places = queue_places(chosen[order], experts)[order.argsort()]
    busiest = int(chosen.flatten().bincount(minlength=experts).max())
    weights = weights * (places < capacity(tokens, experts, k, capacity_factor, busiest))
    if is_gshard_loss:
        loss = gshard_loss(scores, chosen[:, 0])
    else:
        loss = load_importance_loss(logits.softmax(-1), noisy.gather(-1, chosen), gate_noise)
    return Routing(spread(weights if is_postscore else (weights > 0).to(weights), chosen, experts), loss)


def cosine_logits(x: Tensor, projector: Tensor, similarity: Tensor, temperature: Tensor) -> Tensor:
    """`gates/cosine_top.py`: cosines of the projected token and each expert's vector, times a learned temperature."""
    cosines = F.normalize(x @ projector.T, dim=1) @ F.normalize(similarity, dim=0)
    return cosines * temperature.clamp(max=float(torch.tensor(100.0).log())).exp()

"""FastMoE's gates. Source: FastMoE 1.1.0 (commit ee3c561), fmoe/gates/*.py; places: cuda/balancing.cuh."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from oracles.foreign.routing import Routing, mask_of, spread, squared_variation
from torch import Tensor


def naive(logits: Tensor, top_k: int) -> Routing:
    """`NaiveGate`: the softmax of the k best logits; `gate_bias` is on by default."""
    best, chosen = logits.topk(top_k, -1)
    return Routing(spread(best.softmax(-1), chosen, logits.shape[-1]))


def noisy(clean: Tensor, raw: Tensor, top_k: int, normal: Tensor | None, epsilon: float = 1e-2) -> Routing:
    """`NoisyGate`: `raw` [T, E] is x · w_noise; `normal` is standard normal in training. None is evaluation, whose loss
    divides by a deviation of 0, which torch's checks of arguments refuse. The deviation has 0.01 added to it."""
    deviation = F.softplus(raw) + epsilon
    logits = clean if normal is None else clean + normal * deviation
    best, order = logits.topk(top_k + 1, -1)
    weights = spread(best[:, :top_k].softmax(-1), order[:, :top_k], logits.shape[-1])
    if normal is None:
        return Routing(weights)
    threshold = torch.where(logits > best[:, top_k:], best[:, top_k:], best[:, top_k - 1 : top_k])
    load = torch.distributions.Normal(0.0, 1.0).cdf((clean - threshold) / deviation).sum(0)
    return Routing(weights, squared_variation(weights.sum(0)) + squared_variation(load))


def gshard(logits: Tensor, rate: float, *, drawn: Tensor | None) -> Routing:
    """`GShardGate` on one worker: capacity (1.2, 2.4) in training and evaluation; `drawn` [T] are the numbers of
    `random_routing`, which evaluation draws too. `prune_gate_by_capacity` gives places to choices token by token, in
    the order in which a GPU's threads come. Weights are those of both experts, whatever is dropped."""
    tokens, experts = logits.shape
    best, chosen = logits.topk(2, -1)
    weights = best.softmax(-1)
    first = mask_of(chosen[:, :1], experts).double().mean(0)
    loss = (first * logits.softmax(-1).mean(0)).mean() * experts**2
    places = math.ceil(rate * tokens) * 2 // experts
    kept = (mask_of(chosen, experts).cumsum(0) <= places).gather(-1, chosen)
    if drawn is not None:
        kept[:, 1] &= ~(2 * weights[:, 1] < drawn)
    return Routing(spread(weights * kept, chosen, experts), loss)


def switch(logits: Tensor, rate: float, *, noise: Tensor | None = None) -> Routing:
    """`SwitchGate` on one worker: `noise` in [1 − eps, 1 + eps] is *added* to logits in training. The loss counts what
    was kept, and divides sums over all tokens by the number of kept ones."""
    tokens, experts = logits.shape
    scores = (logits if noise is None else logits + noise).softmax(-1)
    best, chosen = scores.topk(1, -1)
    mask = mask_of(chosen, experts)
    kept = mask & (mask.cumsum(0) <= math.ceil(rate * tokens / experts))
    loss = (kept.sum(0) / kept.sum() * scores.sum(0) / kept.sum()).sum() * experts
    return Routing(spread(best, chosen, experts) * kept, loss)

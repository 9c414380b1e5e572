"""DeepSpeed's gates. Source: DeepSpeed 0.19.8, deepspeed/moe/sharded_moe.py (and its defaults: layer.py, class MoE).

`TopKGate.forward` takes `top1gating` for k = 1, `top2gating` for k = 2 and `topkgating` above.
"""

from __future__ import annotations

import torch
from oracles.foreign.routing import Routing, mask_of, queue_places, spread
from torch import Tensor


def capacity(tokens: int, experts: int, factor: float, least: int) -> int:
    """`_capacity`: a ceiling of fp32 numbers; `factor` is times k already."""
    return max(int((tokens / experts * torch.tensor(factor)).ceil()), least)


def top1(
    logits: Tensor,
    *,
    capacity_factor: float = 1.0,
    min_capacity: int = 4,
    drop_tokens: bool = True,
    drawn: Tensor | None = None,
    gumbel: Tensor | None = None,
    used: Tensor | None = None,
) -> Routing:
    """`top1gating`. `gumbel` is the noise of `RSample`, which chooses and does not weigh. `used` are real tokens.

    `drawn` [T] are the random numbers of `use_rts`. Without them `torch.topk` of zeros and ones gives the places: on a
    CPU to any, in CUDA's kernel (`gatherTopK`, by its source) to the first tokens, as here.
    """
    tokens, experts = logits.shape
    gates = logits.softmax(-1)
    mask = mask_of((gates if gumbel is None else logits + gumbel).argmax(-1, keepdim=True), experts)
    if used is not None:
        mask = mask & used[:, None]
    loss = (gates.mean(0) * mask.double().mean(0)).sum() * experts
    if drop_tokens:
        places = min(capacity(tokens, experts, capacity_factor, min_capacity), tokens)
        rank = -torch.arange(tokens).double() if drawn is None else drawn
        asked = torch.where(mask, rank[:, None], -torch.inf)
        mask = mask & torch.zeros_like(mask).scatter(0, asked.topk(places, 0).indices, True)
    return Routing(gates * mask, loss)


def top2(
    logits: Tensor,
    *,
    capacity_factor: float = 1.0,
    min_capacity: int = 4,
    drop_tokens: bool = True,
    gumbel: Tensor | None = None,
) -> Routing:
    """`top2gating`. `gumbel` is the noise of `top2_2nd_expert_sampling`, on by default, which draws the second expert.

    Weights of kept choices are divided by their sum: what is left of a token with a dropped choice weighs 1.
    """
    tokens, experts = logits.shape
    gates = logits.softmax(-1)
    first = gates.argmax(-1, keepdim=True)
    others = (logits if gumbel is None else logits + gumbel).masked_fill(mask_of(first, experts), -torch.inf)
    chosen = torch.cat([first, others.argmax(-1, keepdim=True)], -1)
    loss = (gates.mean(0) * mask_of(first, experts).double().mean(0)).mean() * experts * experts
    weights = gates.gather(-1, chosen)
    if drop_tokens:
        places = capacity(tokens, experts, 2 * capacity_factor, min_capacity)
        weights = weights * (queue_places(chosen, experts) < places)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    return Routing(spread(weights, chosen, experts), loss)


def topk(
    logits: Tensor,
    k: int,
    *,
    capacity_factor: float = 1.0,
    min_capacity: int = 4,
    drop_tokens: bool = True,
    drop_policy: str = "probs",
) -> Routing:
    """`topkgating`; the class has no argument for `drop_policy`. Weights of kept choices are divided by their sum."""
    tokens, experts = logits.shape
    gates = logits.softmax(-1)
    mask = mask_of(gates.topk(k, -1).indices, experts)
    loss = (gates.mean(0) * mask.double().mean(0)).mean() * experts * experts / k
    if drop_tokens:
        places = capacity(tokens, experts, k * capacity_factor, min_capacity)
        if drop_policy == "probs":
            kept = torch.zeros_like(mask).scatter(0, (gates * mask).topk(min(places, tokens), 0).indices, True)
        else:
            kept = mask.cumsum(0) <= places
        mask = mask & kept
    weights = gates * mask
    return Routing(weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps), loss)


def gumbel(shape: torch.Size, seed: int) -> Tensor:
    """`gumbel_rsample`, of a seed."""
    uniform = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return -(-uniform.log()).log()

"""Gates that choose for all tokens of a routing group at once, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_tokens(scores: Tensor, real: Tensor | None, parts: int, whole: int, groups: int) -> Tensor:
    batch, tokens, num_experts = scores.shape
    experts = torch.arange(num_experts, device=scores.device)
    if not scores.numel():
        return experts.expand(scores.shape).clone()
    together = tokens * (batch // groups if groups else 1)
    capacity = min(together, -(-parts * together // (whole * num_experts)))
    by_expert = scores.detach().reshape(-1, together, num_experts).transpose(1, 2)
    allowed = torch.ones_like(by_expert, dtype=torch.bool)
    if real is not None:
        allowed = (real != 0).view(-1, 1, together).expand_as(by_expert)
    by_expert = by_expert.masked_fill(~allowed, -torch.inf)
    # The last score with a place; of the tokens that have it, the first ones get the places that are left.
    last = by_expert.topk(capacity, dim=2)[0][..., -1:]
    above, equal = by_expert > last, (by_expert == last) & allowed
    left = capacity - above.sum(dim=2, keepdim=True)
    taken = above | (equal & (equal.cumsum(dim=2) <= left))
    return experts.where(taken.transpose(1, 2).contiguous(), -1).view(scores.shape)

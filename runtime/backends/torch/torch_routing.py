"""Routing and its balance loss in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.job.unscored import note_or_refuse

ROUNDS = 16
"""Choices up to which rounds of `max` are faster than a stable sort of up to 256 experts on CPU."""


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
    sigmoid = score == "sigmoid"
    # A sigmoid is exp(logsigmoid), so sigmoids over their sum are a softmax of logsigmoids, which cannot be 0 / 0.
    log_scores = F.logsigmoid(logits) if sigmoid else logits
    probabilities = log_scores.softmax(dim=-1)
    if order == "after" and bias is None:
        keys = logits
    elif sigmoid:
        keys = logits.sigmoid()
    else:
        keys = probabilities
    remaining = _clamped(keys if bias is None else keys + bias)
    if groups > 1:
        _leave_out_groups(remaining, groups, keep_groups, group_score)
    best, experts = _largest(remaining, k)
    if bias is not None:
        best = (logits if order == "after" else keys).gather(-1, experts)
    if normalize or (order == "after" and not sigmoid):
        weights = log_scores.gather(-1, experts).softmax(dim=-1)
    elif order == "after":
        weights = best.sigmoid()
    else:
        weights = best
    if scale != 1:
        weights = weights * scale
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
    sigmoid = score == "sigmoid"
    if scale != 1 and grad_weights is not None:
        grad_weights, weights = grad_weights * scale, weights / scale
    # Gradients of four tensors: probabilities, log-scores, and each of these at the chosen experts.
    grad_chosen_probabilities = grad_chosen = None
    if grad_weights is not None:
        if normalize or (order == "after" and not sigmoid):
            grad_chosen = _softmax_backward(grad_weights, weights)
        elif sigmoid:
            grad_chosen = grad_weights * weights
        else:
            grad_chosen_probabilities = grad_weights

    if grad_chosen_probabilities is not None:
        if grad_probabilities is None:
            grad_probabilities = torch.zeros_like(logits).scatter_(-1, experts, grad_chosen_probabilities)
        else:
            grad_probabilities = grad_probabilities.scatter_add(-1, experts, grad_chosen_probabilities)
    if grad_probabilities is None:
        grad = torch.zeros_like(logits)
    else:
        log_scores = F.logsigmoid(logits) if sigmoid else logits
        grad = _softmax_backward(grad_probabilities, log_scores.softmax(dim=-1))
    if grad_chosen is not None:
        grad.scatter_add_(-1, experts, grad_chosen)
    return grad.mul_(torch.sigmoid(-logits)) if sigmoid else grad


def _softmax_backward(grad: Tensor, output: Tensor) -> Tensor:
    return torch._softmax_backward_data(grad, output, -1, output.dtype)


def _clamped(keys: Tensor) -> Tensor:
    """A copy of keys in which -inf is the lowest finite number: an expert that is taken or left out is below it."""
    return keys.clamp_min(torch.finfo(keys.dtype).min)


def _leave_out_groups(keys: Tensor, groups: int, keep_groups: int, group_score: str) -> None:
    """Makes the keys -inf outside of each token's `keep_groups` best groups; a lower number could be a key."""
    by_group = keys.view(*keys.shape[:-1], groups, keys.shape[-1] // groups)
    scores, first = by_group.max(-1, keepdim=True)
    if group_score == "top2_sum" and by_group.shape[-1] > 1:
        scores = scores + by_group.scatter(-1, first, -torch.inf).amax(-1, keepdim=True)
    _, kept = _largest(_clamped(scores.squeeze(-1)), keep_groups)
    left_out = torch.ones(scores.shape, dtype=torch.bool, device=keys.device)
    left_out.squeeze(-1).scatter_(-1, kept, False)
    by_group.masked_fill_(left_out, -torch.inf)


def _largest(remaining: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of clamped keys along the last dim, best first, equal ones by index. Overwrites the keys.

    `topk` breaks ties in no defined order. k rounds of `max`, which returns the first of equals, take about as long on
    CPU from 8 to 256 experts, and a stable sort up to four times as long (measured). `max` ranks NaN largest.
    """
    if k > ROUNDS:
        best, experts = remaining.sort(dim=-1, descending=True, stable=True)
        return best[..., :k].contiguous(), experts[..., :k].contiguous()
    best = remaining.new_empty((*remaining.shape[:-1], k))
    experts = torch.empty_like(best, dtype=torch.int64)
    for choice in range(k):
        torch.max(remaining, -1, keepdim=True, out=(best.narrow(-1, choice, 1), experts.narrow(-1, choice, 1)))
        if choice < k - 1:
            remaining.scatter_(-1, experts.narrow(-1, choice, 1), -torch.inf)
    return best, experts


def count_choices(experts: Tensor, num_experts: int, groups: int) -> Tensor:
    sequences, tokens, k = experts.shape
    groups = groups or sequences
    choices = experts.reshape(groups, (sequences // groups if groups else 0) * tokens * k)
    counts = choices.new_zeros((groups, num_experts))
    return counts.scatter_add_(1, choices.clamp_min(0), (choices >= 0).to(torch.int64))


def switch_loss(probabilities: Tensor, choices: Tensor) -> Tensor:
    # S · E · Σᵢ (countᵢ / kS) · (Σₛ probabilityₛᵢ / S) = E / kS · Σₛᵢ countᵢ · probabilityₛᵢ
    sums = probabilities.sum(dim=1)
    return (_load_fractions(probabilities, choices) * sums).sum()


def switch_loss_backward(grad: Tensor, probabilities: Tensor, choices: Tensor) -> Tensor:
    fractions = _load_fractions(probabilities, choices).mul_(grad)
    return fractions[:, None].expand(probabilities.shape).contiguous()


def _load_fractions(probabilities: Tensor, choices: Tensor) -> Tensor:
    """E times each expert's fraction of the choices of a sequence's group: [B, E]."""
    total = choices.sum(dim=1, keepdim=True).clamp_min(1)
    fractions = choices.to(probabilities.dtype) * (choices.shape[1] / total.to(probabilities.dtype))
    return fractions.repeat_interleave(probabilities.shape[0] // max(choices.shape[0], 1), dim=0)

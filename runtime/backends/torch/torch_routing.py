"""Routing and its balance loss in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.job.unscored import note_or_refuse


def route(
    logits: Tensor, bias: Tensor | None, k: int, score: str, order: str, normalize: bool, scale: float = 1.0
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
    best, experts = _largest(keys if bias is None else keys + bias, k)
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


def _largest(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last dim, best first, equal ones by index.

    `topk` breaks ties in no defined order. k rounds of `max`, which returns the first of equals, take about as long on
    CPU from 8 to 256 experts, and a stable sort up to four times as long (measured). `max` ranks NaN largest.
    """
    # Finite, so that an expert that was taken is below every other, even one whose key is -inf.
    remaining = keys.clamp_min(torch.finfo(keys.dtype).min)
    best = keys.new_empty((*keys.shape[:-1], k))
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

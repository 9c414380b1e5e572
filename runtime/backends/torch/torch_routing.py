"""Routing and its balance loss in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.unscored import note_or_refuse

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
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    probabilities = _over_their_sum(scores, logits) if sigmoid else scores
    keys = logits if order == "after" and bias is None else scores
    remaining = _clamped(keys) if bias is None else _clamped(keys + bias, in_place=True)
    if groups > 1:
        _leave_out_groups(remaining, groups, keep_groups, group_score)
    best, experts = _largest(remaining, k)
    if bias is not None:
        best = (logits if order == "after" else keys).gather(-1, experts)
    if normalize or (order == "after" and not sigmoid):
        chosen = logits.gather(-1, experts)
        weights = _softmax_of_few(F.logsigmoid(chosen) if sigmoid else chosen)
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
        probabilities = _over_their_sum(logits.sigmoid(), logits, in_place=True) if sigmoid else logits.softmax(dim=-1)
        grad = _softmax_backward(grad_probabilities, probabilities)
    if grad_chosen is not None:
        grad.scatter_add_(-1, experts, grad_chosen)
    return grad.mul_(logits.neg().sigmoid_()) if sigmoid else grad


def _softmax_of_few(x: Tensor) -> Tensor:
    """The softmax over the last dim of few numbers: over columns, a fifth of the time on CPU (measured)."""
    return x.transpose(-1, -2).softmax(dim=-2).transpose(-1, -2).contiguous()


def _over_their_sum(sigmoids: Tensor, logits: Tensor, in_place: bool = False) -> Tensor:
    """Sigmoids over their sum; where the sum underflows, the softmax of their logarithms, which cannot be 0 / 0.

    On CPU the softmax is skipped where no token needs it: logarithms take most of the time of a gate (measured).
    `in_place` may overwrite the sigmoids.
    """
    sums = sigmoids.sum(-1, keepdim=True)
    small = sums <= torch.finfo(sums.dtype).tiny ** 0.5
    if sums.device.type == "cpu" and not small.any():
        return sigmoids.div_(sums) if in_place else sigmoids / sums
    return torch.where(small, F.logsigmoid(logits).softmax(-1), sigmoids / sums)


def _softmax_backward(grad: Tensor, output: Tensor) -> Tensor:
    return torch._softmax_backward_data(grad, output, -1, output.dtype)


def _clamped(keys: Tensor, in_place: bool = False) -> Tensor:
    """Keys with -inf raised to the lowest finite number: -inf then marks experts that are chosen or left out."""
    lowest = torch.finfo(keys.dtype).min
    return keys.clamp_min_(lowest) if in_place else keys.clamp_min(lowest)


def _leave_out_groups(keys: Tensor, groups: int, keep_groups: int, group_score: str) -> None:
    """Makes the keys -inf outside of each token's `keep_groups` best groups; a lower number could be a key."""
    size = keys.shape[-1] // groups
    by_group = keys.view(-1, groups, size)
    # Tokens last: then the operations are over long rows, not over the few experts of a group or the few groups.
    columns = by_group.flatten(1).t().contiguous().view(groups, size, len(by_group))
    scores = columns.amax(1) if group_score == "max" else _sum_of_two_largest(columns)
    left_out = (_numbers_of_better(scores) >= keep_groups).t().contiguous()
    # Keys to which 0 is added keep their bits, but for the sign of a zero.
    by_group.add_(torch.zeros_like(left_out, dtype=keys.dtype).masked_fill_(left_out, -torch.inf).unsqueeze(-1))


def _numbers_of_better(scores: Tensor) -> Tensor:
    """For each score of a column of [N, T], the number of better ones: larger, or equal and before. In their dtype.

    NaN is the largest number, -inf the lowest finite one: it is the sum of two such keys.
    """
    scores = scores.nan_to_num(torch.inf, torch.inf)
    numbers = torch.zeros_like(scores)
    for row in range(len(scores) - 1):
        # Of a score and one after it the one or the other is better: 1 or 0.
        wins = torch.ge(scores[row], scores[row + 1 :], out=torch.empty_like(scores[row + 1 :]))
        numbers[row + 1 :] += wins
        numbers[row] += len(wins) - wins.sum(0)
    return numbers


def _sum_of_two_largest(x: Tensor) -> Tensor:
    """The sum of the two largest of x [N, n, T] over n, by a tournament: [N, T]; with n = 1, x itself."""
    first: Tensor = x
    second: Tensor | None = None
    while (size := first.shape[1]) > 1:
        half = size // 2
        a, b = first.narrow(1, 0, half), first.narrow(1, half, half)
        smaller = torch.minimum(a, b)
        if second is not None:
            smaller = smaller.maximum(second.narrow(1, 0, half)).maximum(second.narrow(1, half, half))
        odd, odd_second = first.narrow(1, 2 * half, size - 2 * half), second
        first, second = a.maximum(b), smaller
        if odd.shape[1]:
            first = torch.cat((first, odd), 1)
            seconds = torch.full_like(odd, -torch.inf) if odd_second is None else odd_second.narrow(1, 2 * half, 1)
            second = torch.cat((second, seconds), 1)
    return (first if second is None else first + second).squeeze(1)


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

"""A local mixture of few tokens in plain torch: forward alone, with rows sorted in Python."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_activations import activate
from moec.runtime.backends.torch.torch_rows import refuse_out_of_range, token_sums

FEW = 64
"""Choices up to which rows are sorted in Python: that takes 0.5 to 0.9 of the time of `mixture_mlp` (measured, 2 to 64
choices of 8 and of 64 experts, one thread)."""


def mixture_of_few(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> Tensor:
    """The first result of `mixture_mlp`, whose rows are sorted in Python."""
    k, (dim, width), flat = experts.shape[2], down.shape[1:], x.reshape(-1, x.shape[2])
    choices: list[int] = experts.reshape(-1).tolist()
    if choices and not -1 <= min(choices) <= max(choices) < up.shape[0]:
        refuse_out_of_range("mixture_mlp", experts, up.shape[0], -1)
    choices_by_expert: dict[int, list[int]] = {}
    for number, expert in enumerate(choices):
        if expert >= 0:
            choices_by_expert.setdefault(expert, []).append(number)
    order = [number for numbers in choices_by_expert.values() for number in numbers]
    sizes = [len(numbers) for numbers in choices_by_expert.values()]
    if not order:
        return torch.zeros_like(x)
    positions = [-1] * len(choices)
    for position, number in enumerate(order):
        positions[number] = position
    rows = flat.expand(len(order), dim) if len(flat) == 1 else flat[[number // k for number in order]]
    hidden, activated = x.new_empty((len(order), up.shape[1], width)), x.new_empty((len(order), width))
    _project(rows, up.flatten(1, 2), up_bias, choices_by_expert, sizes, hidden.flatten(1))
    activate(activated, hidden, activation, clamp, alpha)
    out = x.new_empty((len(order), dim))
    _project(activated, down, down_bias, choices_by_expert, sizes, out)
    return token_sums(out, torch.tensor(positions).view(experts.shape), weights, len(order) < len(choices))


def _project(
    rows: Tensor, weights: Tensor, biases: Tensor | None, experts: Iterable[int], sizes: list[int], out: Tensor
) -> None:
    """out [R, O], of rows [R, I] sorted by expert, weights [E, O, I], and biases, E times O numbers."""
    transposed = weights.transpose(1, 2)
    for expert, expert_rows, expert_out in zip(experts, torch.split(rows, sizes), torch.split(out, sizes), strict=True):
        if biases is None:
            torch.mm(expert_rows, transposed[expert], out=expert_out)
        else:
            torch.addmm(biases[expert].flatten(), expert_rows, transposed[expert], out=expert_out)

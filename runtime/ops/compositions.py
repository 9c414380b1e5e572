"""The operators as compositions of PyTorch's own, which can be differentiated in every mode and any number of times.

`derivatives.py` runs them for derivatives that the operators' own rules do not give: second derivatives, forward mode,
transforms of `torch.func`. They take choices, positions and counts from the operator's results, so that these do not
change. They compute in at least float32, as the operators do, are slower than the operators and need more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.passes.ir.activations import ACTIVATIONS
from moec.runtime.backends.torch.torch_rope import rope_tables

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * x.sigmoid(),  # `silu_backward` has no forward mode
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}
"""By the names of `passes/ir/activations.py`."""


def wide(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- rows ----------------------------------------------------------------------------------------------


def rows_at(rows: Tensor, positions: Tensor) -> Tensor:
    """The row of each choice, zeros for −1: rows [R, D] or [E, N, D], positions [B, S, k] -> [B, S, k, D]."""
    flat = wide(rows).reshape(-1, rows.shape[-1])
    return torch.cat([flat, flat.new_zeros(1, flat.shape[1])])[positions]


def to_rows(values: Tensor, positions: Tensor, shape: Sequence[int]) -> Tensor:
    """Each choice's numbers [B, S, k, D] in its row, zeros elsewhere -> [*shape, D]."""
    number = prod(shape)
    places = positions.where(positions >= 0, number).reshape(-1)
    rows = values.new_zeros(number + 1, values.shape[-1]).index_add(0, places, values.reshape(-1, values.shape[-1]))
    return rows[:-1].reshape(*shape, values.shape[-1])


def permuted(x: Tensor, positions: Tensor, shape: Sequence[int]) -> Tensor:
    """x [B, S, D] -> [*shape, D]: each token in the rows of its choices, zeros elsewhere."""
    return to_rows(wide(x)[:, :, None].expand(*positions.shape, x.shape[2]), positions, shape).to(x.dtype)


def permuted_weights(weights: Tensor, positions: Tensor, shape: Sequence[int]) -> Tensor:
    """weights [B, S, k] -> [*shape]: the weight of each row, 0 in rows without a choice."""
    return to_rows(weights[..., None], positions, shape)[..., 0]


def combined(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """rows [R, D] or [E, N, D] -> [B, S, D]: each token's sum of its rows, by weights [B, S, k] if given."""
    chosen = rows_at(rows, positions)
    return (chosen if weights is None else chosen * weights[..., None]).sum(2).to(rows.dtype)


# ---- gates ---------------------------------------------------------------------------------------------


def routed(
    logits: Tensor, experts: Tensor, score: str, order: str, normalize: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The probabilities, and the weights of these choices."""
    sigmoid = score == "sigmoid"
    logs = F.logsigmoid(logits) if sigmoid else logits
    probabilities = logs.softmax(-1)
    if normalize or (order == "after" and not sigmoid):
        weights = logs.gather(-1, experts).softmax(-1)
    elif sigmoid:
        weights = logits.gather(-1, experts).sigmoid()
    else:
        weights = probabilities.gather(-1, experts)
    return probabilities, weights * scale


# ---- experts -------------------------------------------------------------------------------------------


def activated(hidden: Tensor, activation: str, clamp: float | None = None, alpha: float | None = None) -> Tensor:
    """hidden [..., G, F] -> [..., F]."""
    kind = ACTIVATIONS[activation]
    gate, *up = wide(hidden).unbind(-2)
    if clamp is None and alpha is None:
        active = FUNCTIONS[kind.function.name](gate)
        return (active * up[0] if up else active).to(hidden.dtype)
    (second,) = up
    if clamp is not None:
        gate, second = gate.clamp(max=clamp), second.clamp(-clamp, clamp)
    if alpha is not None:
        second = second + 1
    share = (gate if alpha is None else alpha * gate).sigmoid()
    return (gate * share * second).to(hidden.dtype)


def experts_of_rows(counts: Tensor) -> Tensor:
    """The expert of each row, rows sorted by source and then by expert: counts [sources, E] -> [R]."""
    sources, experts = counts.shape
    numbers = torch.arange(experts, device=counts.device).repeat(sources)
    return numbers.repeat_interleave(counts.reshape(-1))


def linear_by_expert(rows: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each row times its expert's matrix: rows [R, I], experts [R], −1 for zeros, weight [E, O, I] -> [R, O]."""
    parts, places = [rows.new_zeros(0, weight.shape[1])], [experts.new_zeros(0)]
    for expert in range(weight.shape[0]):
        row_numbers = (experts == expert).nonzero()[:, 0]
        if row_numbers.shape[0]:
            parts.append(F.linear(rows[row_numbers], weight[expert], None if bias is None else bias[expert]))
            places.append(row_numbers)
    return rows.new_zeros(rows.shape[0], weight.shape[1]).index_copy(0, torch.cat(places), torch.cat(parts))


def mlp_by_expert(
    rows: Tensor,
    experts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """Each row through its expert's feed-forward; zeros for expert −1."""
    bias = None if up_bias is None else up_bias.flatten(1)
    hidden = linear_by_expert(rows, experts, up.flatten(1, 2), bias).reshape(rows.shape[0], *up.shape[1:3])
    return linear_by_expert(activated(hidden, activation, clamp, alpha), experts, down, down_bias)


def mixture(x: Tensor, experts: Tensor, weights: Tensor, *parameters: object) -> Tensor:
    """`mixture_mlp`'s first result: x [B, S, D], experts and weights [B, S, k]."""
    rows = x[:, :, None].expand(*experts.shape, x.shape[2]).reshape(-1, x.shape[2])
    out = mlp_by_expert(rows, experts.reshape(-1), *parameters)  # type: ignore[arg-type]
    return (wide(out).view(*experts.shape, x.shape[2]) * weights[..., None]).sum(2).to(x.dtype)


# ---- attention, positions and norms --------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention with the whole matrix of scores; mask bool [B or 1, 1, S, S]."""
    k, v = (wide(x).repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", wide(q), k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, wide(sinks)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v).to(q.dtype)


def turned(
    x: Tensor,
    positions: Tensor | None,
    theta: float,
    start: int = 0,
    width: int = 0,
    interleaved: bool = False,
    frequencies: Sequence[float] = (),
    factor: float = 1.0,
) -> Tensor:
    """`rope`: x [B, S, H, head dim], positions [B, S] -> like x."""
    width, wide_x = width or x.shape[3] - start, wide(x)
    cos, sin = rope_tables(x.shape[1], width, theta, wide_x.dtype, x.device, tuple(frequencies), factor)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    unturned_start, turning, unturned_end = torch.split(wide_x, [start, width, x.shape[3] - start - width], -1)
    pairs = turning.reshape(*turning.shape[:-1], *((width // 2, 2) if interleaved else (2, width // 2)))
    a, b = pairs.unbind(-1 if interleaved else -2)
    result = torch.stack([a * cos - b * sin, b * cos + a * sin], -1 if interleaved else -2)
    return torch.cat([unturned_start, result.flatten(-2), unturned_end], -1).to(x.dtype)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm`: x [B, S, D], weight and bias [D] -> like x."""
    wide_bias = None if bias is None else wide(bias)
    return F.layer_norm(wide(x), list(weight.shape), wide(weight), wide_bias, eps).to(x.dtype)


def embedded(ids: Tensor, table: Tensor) -> Tensor:
    """`embed`: ids int64 [B, S], table [V, D] -> [B, S, D]."""
    return wide(table)[ids].to(table.dtype)

"""Parts of models as plain functions of moec's parameters, for handwritten definitions of whole models.

`p` are the parameters of one layer by their names, such as `attention.q.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(p: Parameters, h: Tensor, *, mask: Tensor | None = None, causal: bool = True) -> Tensor:
    """Softmax attention, kv heads repeated; `mask` [batch or 1, sequence, sequence] says which pairs see each other."""
    q, k, v = (torch.einsum("btd,hwd->bhtw", h, p[f"attention.{name}.weight"]) for name in "qkv")
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    length = h.shape[1]
    seen = torch.ones(1, length, length, dtype=torch.bool) if mask is None else mask
    seen = seen.tril() if causal else seen
    attended = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
    return torch.einsum("bhtw,dhw->btd", attended, p["attention.o.weight"])


def gelu_ffn(p: Parameters, h: Tensor) -> Tensor:
    (up,) = p["ffn.up.weight"]
    return F.gelu(h @ up.T) @ p["ffn.down.weight"].T


def swiglu_mixture(p: Parameters, h: Tensor, k: int) -> Tensor:
    """`topk(k, normalize = true)` over swiglu experts, one token and one choice at a time."""
    out = []
    for token in h.flatten(0, -2):
        chosen = (p["moe.gate.weight"] @ token).softmax(0).topk(k)
        weights, y = chosen.values / chosen.values.sum(), torch.zeros_like(token)
        for weight, expert in zip(weights, chosen.indices, strict=True):
            gate, up = p["moe.experts.up.weight"][expert]
            y = y + weight * (p["moe.experts.down.weight"][expert] @ (F.silu(gate @ token) * (up @ token)))
        out.append(y)
    return torch.stack(out).view_as(h)


def of_layer(parameters: Parameters, number: int) -> Parameters:
    """The parameters of one layer, by their names in it."""
    prefix = f"layers.{number}."
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}

"""Parts of models as plain functions of moec's parameters, for handwritten definitions of whole models.

`p` are the parameters of one layer by their names, such as `attention.q.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.job.module import PlanModule

Parameters = Mapping[str, Tensor]
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


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


def spread(model: PlanModule, seed: int = 1) -> dict[str, Tensor]:
    """Draws the model's parameters so large that no term is negligible; returns copies of them, by name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = 0.3 if parameter.dim() > 1 else 0.1
            parameter += deviation * torch.randn(parameter.shape, generator=generator).to(parameter)
    return {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}


def require_gradients(ours: PlanModule, plain: Parameters) -> None:
    """Every gradient agrees to 1e-10, and none that a test should see is zero."""
    for name, parameter in ours.named_parameters():
        expected = plain[name].grad
        assert expected is not None, name
        assert parameter.grad is not None, name
        assert expected.abs().max() > 0, f"{name}: the test sees no gradient"
        torch.testing.assert_close(parameter.grad, expected, **TIGHT, msg=lambda text, n=name: f"{n}: {text}")

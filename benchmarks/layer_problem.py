"""The inputs of every implementation of one MoE layer, and the float64 reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error of any token's vector, relative to the mean length of them all."""

OfExpert = Callable[..., None]
"""Takes an expert's number and its matrices' gradients `up` [2F, D] and `down` [D, F] in float64."""

LOADS = ("uniform", "zipf", "some")


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens, model dim, hidden dim of an expert, experts, choices per token."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    k: int

    def __str__(self) -> str:
        return f"T{self.tokens}-D{self.dim}-F{self.hidden}-E{self.experts}-k{self.k}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads the text of `str`. Raises `ValueError`."""
        match = re.fullmatch(r"T(\d+)-D(\d+)-F(\d+)-E(\d+)-k(\d+)", text)
        if match is None:
            raise ValueError(f"a shape is written as {CPU_SHAPES[0]}, not {text}")
        return cls(*map(int, match.groups()))

    @property
    def flops(self) -> int:
        """Of the forward pass; the backward pass takes twice as many."""
        return 6 * self.tokens * self.k * self.dim * self.hidden


CPU_SHAPES = (Shape(2048, 512, 1024, 16, 2), Shape(2048, 512, 256, 64, 8), Shape(256, 512, 1024, 16, 2))
CUDA_SHAPES = tuple(
    Shape(tokens, *layer)
    for layer in (
        (4096, 14336, 8, 2),  # Mixtral 8x7B
        (2048, 768, 128, 8),  # Qwen3-30B-A3B
        (2048, 1024, 64, 8),  # OLMoE
        (7168, 2048, 256, 8),  # DeepSeek-V3
        (2880, 2880, 128, 4),  # gpt-oss-120b
        (4096, 1024, 64, 4),  # SonicMoE's 7B
        (2048, 2048, 2, 2),  # Tutel's layer
    )
    for tokens in (1024, 8192, 32768)
)


@dataclass(frozen=True, slots=True)
class Problem:
    """x and grad [T, D]; gate [E, D], up [E, 2F, D] (gate first), down [E, D, F]; all of one dtype."""

    shape: Shape
    x: Tensor
    grad: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def make_problem(shape: Shape, dtype: torch.dtype, device: str, load: str = "uniform") -> Problem:
    """Random weights and tokens; expert e gets a share of 1/E, or with `zipf` in proportion to 1 / (e + 1)^1.1.

    With `some` every other expert gets none, as long as k ≤ E / 2.

    Router row e reads coordinate e of a token. Those are a token's own order of E numbers that bfloat16 holds exactly,
    so every implementation finds the same logits and chooses the same experts, however it rounds.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype, device=device).mul_(scale)

    experts, dim, hidden = shape.experts, shape.dim, shape.hidden
    x, grad = normal(shape.tokens, dim, scale=1), normal(shape.tokens, dim, scale=1)
    gate = torch.eye(experts, dim, dtype=dtype, device=device)
    # The order of log-shares plus Gumbel noise is a draw without replacement in proportion to the shares.
    noise = -torch.empty(shape.tokens, experts, device=device).exponential_(generator=generator).log()
    if load == "zipf":
        noise -= 1.1 * torch.arange(1, experts + 1, device=device).log()
    if load == "some":
        noise[:, 1::2] -= 1e6
    x[:, :experts] = ((noise.argsort().argsort() - experts / 2) / 32).to(dtype)
    up, down = normal(experts, 2 * hidden, dim, scale=dim**-0.5), normal(experts, dim, hidden, scale=hidden**-0.5)
    return Problem(shape, x, grad, gate, up, down)


def reference(problem: Problem, each: OfExpert | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and router gradient of the layer in float64, one expert at a time.

    `each` is called with every expert's number and the gradients `up` and `down` of its matrices.
    """
    x, grad = problem.x.double().requires_grad_(), problem.grad.double()
    router = problem.gate.double().requires_grad_()
    scores, chosen = (x @ router.t()).softmax(-1).topk(problem.shape.k)
    weights = scores / scores.sum(-1, keepdim=True)
    shares = weights.detach().requires_grad_()
    out = torch.zeros_like(grad)
    for expert in range(problem.shape.experts):
        tokens, choice = (chosen == expert).nonzero(as_tuple=True)
        up, down = (matrices[expert].double() for matrices in (problem.up, problem.down))
        if each is not None:
            up, down = up.requires_grad_(), down.requires_grad_()
        first, second = (x[tokens] @ up.t()).chunk(2, -1)
        rows = (F.silu(first) * second) @ down.t() * shares[tokens, choice, None]
        rows.backward(grad[tokens])
        out.index_add_(0, tokens, rows.detach())
        if each is not None:
            assert up.grad is not None
            assert down.grad is not None
            each(expert, up=up.grad, down=down.grad)
    weights.backward(shares.grad)
    assert x.grad is not None
    assert router.grad is not None
    return out, x.grad, router.grad


def worst_error(ours: Tensor, exact: Tensor) -> float:
    """The largest error of any token's vector, relative to the mean length of them all."""
    return float((ours.double() - exact).norm(dim=-1).max() / exact.norm(dim=-1).mean())

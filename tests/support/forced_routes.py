"""The handwritten model with forced choices: each token goes to the experts that `routes` names, −1 for none."""

from __future__ import annotations

import math

import torch
from plain_moe import PlainModel, PlainMoe, probabilities
from torch import Tensor

from moec.grammar.spec import SwitchLoss


class ForcedMoe(PlainMoe):
    """`PlainMoe` with `routes` [batch, sequence, k] in place of the choices, one token after the other."""

    routes: Tensor
    real: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        rows = [[self.token(x, logits, i, t) for t in range(x.shape[1])] for i in range(x.shape[0])]
        mixed = torch.stack([torch.stack(row) for row in rows])
        return self.with_dense_paths(x, mixed), self.balance(logits, self.routes)

    def token(self, x: Tensor, logits: Tensor, sequence: int, token: int) -> Tensor:
        """The weighted sum of a token's experts; of its choices only those count that are not −1 and have a place."""
        chosen = [e for e in self.routes[sequence, token].tolist() if e >= 0]
        total = torch.zeros_like(x[sequence, token])
        for expert, weight in zip(chosen, self.weights(logits[sequence, token], chosen), strict=True):
            if self.has_place(sequence, token, expert):
                total = total + weight * self.experts[expert](x[sequence, token])
        return total

    def weights(self, logits: Tensor, chosen: list[int]) -> list[Tensor]:
        """By hand: sigmoid or exponential over a sum, which is over all experts, or over the chosen ones."""
        raw = [
            1 / (1 + torch.exp(-logits[e])) if self.topk.score == "sigmoid" else torch.exp(logits[e]) for e in chosen
        ]
        if self.topk.normalize or (self.topk.score == "softmax" and self.topk.order == "after"):
            return [value / sum(raw) for value in raw]
        return raw if self.topk.score == "sigmoid" else [value / torch.exp(logits).sum() for value in raw]

    def has_place(self, sequence: int, token: int, expert: int) -> bool:
        """Whether fewer choices come before it in its sequence's queue than there are places (GShard, algorithm 1)."""
        factor, least = self.places()
        if factor is None:
            return True
        k, tokens = self.topk.k, self.routes.shape[1]
        queue = [(j, t) for j in range(k) for t in range(tokens) if int(self.routes[sequence, t, j]) == expert]
        place = next(n for n, (_, t) in enumerate(queue) if t == token)
        return place < max(least, math.ceil(factor * k * tokens / self.num_experts))

    def balance(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Frequencies of the given choices, probabilities of the router's own scores, over real tokens."""
        total, real = logits.new_zeros(()), self.real
        for term in self.terms:
            if not isinstance(term, SwitchLoss):
                total = total + term.weight * logits[real].logsumexp(-1).square().mean()
                continue
            for sequence in range(chosen.shape[0]):
                counts = [int((chosen[sequence] == e).sum()) for e in range(self.num_experts)]
                own = real[sequence]
                means = probabilities(logits, self.topk.score)[sequence][own].sum(0)
                parts = [means[e] * (counts[e] / max(1, sum(counts))) for e in range(self.num_experts)]
                total = total + term.weight * self.num_experts * sum(parts) / real.sum()
        return total


def force(plain: PlainModel, routes: Tensor, real: Tensor | None = None) -> PlainModel:
    """Forces routes [batch, sequence, mixtures, k] on the mixtures of `plain`, in order. `real`: tokens, no padding."""
    mixtures = [module for module in plain.modules() if isinstance(module, PlainMoe)]
    for number, module in enumerate(mixtures):
        module.__class__ = ForcedMoe
        module.routes = routes[:, :, number, : module.topk.k]
        module.real = torch.ones(routes.shape[:2], dtype=torch.bool) if real is None else real
    return plain


def random_routes(shape: tuple[int, int], experts: list[int], k: list[int], *, none: float = 0.0) -> Tensor:
    """Random different experts of every token in each mixture; `none` of the choices are −1."""
    generator = torch.Generator().manual_seed(4)
    routes = torch.full((*shape, len(k), max(k)), -1)
    for mixture, (count, width) in enumerate(zip(experts, k, strict=True)):
        drawn = torch.rand((*shape, count), generator=generator).argsort(-1)[..., :width]
        routes[:, :, mixture, :width] = drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < none, -1)
    return routes

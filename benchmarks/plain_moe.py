"""The model of a `.moe` file written by hand in plain PyTorch: what a good engineer would write without moec.

It is an independent oracle (tests/oracles compares logits, loss and gradients) and the opponent in bench_step.py, so it
takes nothing from moec but the numbers of the Spec, and the fast way wherever plain PyTorch has one.

    model = PlainModel(spec)
    model.load_state_dict(plain_state_dict(dict(moec.reference(spec).named_parameters())))
    logits, loss = model(tokens, labels)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.grammar.spec import (
    Activated,
    Dynamic,
    Factor,
    Gqa,
    Layer,
    LayerNorm,
    Mha,
    Model,
    Moe,
    Rope,
    Spec,
    Switch,
    SwitchLoss,
    TopK,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IGNORED_LABEL = -100
Activation = Callable[[Tensor], Tensor]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for router, rope and loss: these are not computed in half precision."""
    return torch.promote_types(dtype, torch.float32)


class PlainModel(nn.Module):
    """A decoder-only language model. `model(tokens, labels)` gives the logits and the loss."""

    def __init__(self, spec: Spec, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        model = spec.model
        context = model.context or (spec.train.sequence if spec.train else 0)
        self.embedding = nn.Embedding(model.vocab, model.dim)
        self.layers = nn.ModuleList(PlainLayer(model, layer, context) for layer in model.layers)
        self.positions = nn.Embedding(context, model.dim) if model.embedding.positions == "learned" else None
        self.norm = norm(model)
        self.head = None if model.embedding.tied else nn.Linear(model.dim, model.vocab, bias=False)
        self.to(dtype or DTYPES[model.dtype])

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        balance = 0.0
        for layer in self.layers:
            x, layer_balance = layer(x)
            balance = balance + layer_balance
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        if labels is None:
            return logits, None
        flat = logits.flatten(0, 1).to(at_least_fp32(logits.dtype))
        total = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        return logits, total / (labels != IGNORED_LABEL).sum().clamp(min=1) + balance


def norm(model: Model) -> nn.Module:
    if isinstance(model.norm, LayerNorm):
        return nn.LayerNorm(model.dim, model.norm.eps, bias=model.norm.bias)
    return nn.RMSNorm(model.dim, model.norm.eps)


class PlainLayer(nn.Module):
    """Attention, then a feed-forward or a mixture of them, each pre-normed, each with a residual."""

    def __init__(self, model: Model, layer: Layer, context: int) -> None:
        super().__init__()
        self.attention_norm = norm(model)
        self.attention = PlainAttention(model.dim, layer.attention, context, model.norm.eps)
        self.ffn_norm = norm(model)
        self.is_moe = layer.moe is not None
        if layer.moe is not None:
            self.moe = PlainMoe(model.dim, layer.moe)
        else:
            assert layer.ffn is not None
            self.ffn = feed_forward(model.dim, layer.ffn)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        if self.is_moe:
            mixed, balance = self.moe(h)
            return x + mixed, balance
        return x + self.ffn(h), 0.0


class PlainAttention(nn.Module):
    """Causal multi-head or grouped-query attention with half-split rotary positions."""

    def __init__(self, dim: int, attention: Gqa | Mha, context: int, eps: float) -> None:
        super().__init__()
        heads = attention.heads
        kv_heads = attention.kv_heads if isinstance(attention, Gqa) else heads
        self.head_dim = attention.head_dim or dim // heads
        self.grouped = kv_heads != heads
        self.q = nn.Linear(dim, heads * self.head_dim, bias=attention.bias != "none")
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=attention.bias != "none")
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=attention.bias != "none")
        self.o = nn.Linear(heads * self.head_dim, dim, bias=attention.bias == "all")
        self.rope = PlainRope(attention.rope, self.head_dim, context) if attention.rope else None
        self.q_norm = self.k_norm = None
        if attention.qk_norm != "none":
            whole = attention.qk_norm == "projection"
            self.q_norm = nn.RMSNorm(self.head_dim * (heads if whole else 1), eps)
            self.k_norm = nn.RMSNorm(self.head_dim * (kv_heads if whole else 1), eps)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.normed(self.q(x), self.q_norm), self.normed(self.k(x), self.k_norm)
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(attended.transpose(1, 2).flatten(2))

    def normed(self, projected: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Heads, normed before or after the projection is split into them, as wide as the norm is."""
        if norm is not None and norm.normalized_shape == (projected.shape[-1],):
            projected, norm = norm(projected), None
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return heads if norm is None else norm(heads)


class PlainRope(nn.Module):
    """Rotates pairs (i, i + head_dim / 2) by position · theta^(-2i / head_dim), as Llama's code does."""

    def __init__(self, rope: Rope, head_dim: int, context: int) -> None:
        super().__init__()
        frequencies = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
        # Plain attributes, which `.to(bfloat16)` does not convert.
        self.tables = {
            dtype: (angles.cos().to(dtype), angles.sin().to(dtype)) for dtype in (torch.float32, torch.float64)
        }

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, heads, head_dim]."""
        cos, sin = (table[: x.shape[1], None] for table in self.tables[at_least_fp32(x.dtype)])
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class PlainGated(nn.Module):
    """`down(f(gate(x)) * up(x))`. On CPU two matrices are faster than one that is cut in halves (measured)."""

    def __init__(self, dim: int, hidden: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class PlainUngated(nn.Module):
    """`down(f(up(x)))`."""

    def __init__(self, dim: int, hidden: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


GATED: dict[str, Activation] = {"swiglu": F.silu, "geglu": F.gelu}
UNGATED: dict[str, Activation] = {"gelu": F.gelu, "relu": F.relu, "relu2": lambda x: F.relu(x) ** 2, "silu": F.silu}


def feed_forward(dim: int, body: Activated) -> nn.Module:
    if body.word in GATED:
        return PlainGated(dim, body.hidden, GATED[body.word], body.bias)
    return PlainUngated(dim, body.hidden, UNGATED[body.word], body.bias)


class PlainMoe(nn.Module):
    """A router and its experts; returns the mixed tokens and the weighted balance terms."""

    def __init__(self, dim: int, moe: Moe) -> None:
        super().__init__()
        self.num_experts, self.terms = moe.experts.count, moe.balance
        self.capacity, self.group = moe.capacity, moe.group
        self.topk = TopK(k=1) if isinstance(moe.gate, Switch) else moe.gate
        self.gate = nn.Linear(dim, self.num_experts, bias=False)
        self.experts = nn.ModuleList(feed_forward(dim, moe.experts.body) for _ in range(self.num_experts))
        self.residual = feed_forward(dim, moe.residual) if moe.residual else None
        self.coefficient = nn.Linear(dim, 2) if moe.residual else None
        self.shared = feed_forward(dim, moe.shared) if moe.shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if moe.shared and moe.shared.gated else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """x [batch, sequence, dim]."""
        logits = self.logits(x)
        weights, chosen = choose(logits, self.topk)
        factor, least = self.places()
        if factor is not None:
            groups = chosen.shape[0] if self.group == "sequence" else 1
            weights = weights * kept_choices(chosen, factor, least, groups, self.num_experts)
        mixed = self.mix(x.flatten(0, 1), weights, chosen).view_as(x)
        return self.with_dense_paths(x, mixed), self.balance(logits, chosen)

    def logits(self, x: Tensor) -> Tensor:
        """The router's scores, in at least fp32."""
        dtype = at_least_fp32(x.dtype)
        return F.linear(x.to(dtype), self.gate.weight.to(dtype))

    def places(self) -> tuple[float | None, int]:
        """The capacity factor that drops choices, if one does, and the places that there are at least."""
        if isinstance(self.capacity, Factor):
            evaluated = None if self.training else self.capacity.eval
            return evaluated or self.capacity.factor, self.capacity.min
        return (self.capacity.max, 1) if isinstance(self.capacity, Dynamic) else (None, 1)

    def with_dense_paths(self, x: Tensor, mixed: Tensor) -> Tensor:
        """As DeepSpeed's `MoE.forward` mixes its residual path in, and Qwen2-MoE adds its shared expert."""
        if self.residual is not None and self.coefficient is not None:
            share = self.coefficient(x).softmax(-1)
            mixed = mixed * share[..., 0:1] + self.residual(x) * share[..., 1:]
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return mixed + shared

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sorts the tokens' copies by expert, runs each expert on its slice, and undoes the sorting.

        Faster than a loop of `where` and `index_add` (measured).
        """
        order = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=self.num_experts).tolist()
        shares = x.index_select(0, order // self.topk.k).split(sizes)
        rows = torch.cat([expert(share) for expert, share in zip(self.experts, shares, strict=True)])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        by_token = rows.index_select(0, back).unflatten(0, (-1, self.topk.k))
        return (by_token * weights.flatten(0, 1)[..., None]).sum(1).to(x.dtype)

    def balance(self, logits: Tensor, chosen: Tensor) -> Tensor | float:
        total: Tensor | float = 0.0
        for term in self.terms:
            if isinstance(term, SwitchLoss):
                scores = probabilities(logits, self.topk.score)
                if self.group != "sequence":  # of one rank: its whole batch is one group
                    scores, counted = scores.flatten(0, 1)[None], chosen.flatten(0, 1)[None]
                value = switch_loss(scores, counted if self.group != "sequence" else chosen)
            else:
                value = logits.logsumexp(-1).square().mean()
            total = total + term.weight * value
        return total


def choose(logits: Tensor, topk: TopK) -> tuple[Tensor, Tensor]:
    """Each token's k experts and their weights, [batch, sequence, k] both."""
    score = torch.sigmoid if topk.score == "sigmoid" else lambda values: values.softmax(-1)
    if topk.order == "after":
        best, chosen = logits.topk(topk.k, dim=-1)
        weights = score(best)
    else:
        weights, chosen = score(logits).topk(topk.k, dim=-1)
    if topk.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def probabilities(logits: Tensor, score: str) -> Tensor:
    """The scores of all experts for balance terms, which sum to 1."""
    if score == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def kept_choices(chosen: Tensor, factor: float, least: int, groups: int, num_experts: int) -> Tensor:
    """1 for each of [batch, sequence, k] choices with a place, else 0, counted one by one (GShard, algorithm 1)."""
    kept = torch.zeros_like(chosen)
    for members in torch.arange(chosen.shape[0]).chunk(groups):
        tokens = len(members) * chosen.shape[1]
        places = max(least, math.ceil(factor * chosen.shape[2] * tokens / num_experts))
        taken = [0] * num_experts
        for choice in range(chosen.shape[2]):
            for sequence in members.tolist():
                for token, expert in enumerate(chosen[sequence, :, choice].tolist()):
                    kept[sequence, token, choice] = taken[expert] < places
                    taken[expert] += 1
    return kept


def switch_loss(scores: Tensor, chosen: Tensor) -> Tensor:
    """`E · Σᵢ fᵢ·Pᵢ` of each sequence, averaged over sequences, which are equally long (Fedus et al. 2021, eq. 4)."""
    num_experts = scores.shape[-1]
    share = F.one_hot(chosen.flatten(1), num_experts).to(scores.dtype).mean(1)
    return num_experts * (share * scores.mean(1)).sum(-1).mean()

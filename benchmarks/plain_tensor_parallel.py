"""A mixture-of-experts transformer with tensor, sequence and expert parallelism, written by hand in plain PyTorch.

What an engineer would write for one model on one layout: attention by heads and embedding, head and loss by vocabulary
over `tp` (Shoeybi et al. 2019), sequence parallelism between them (Korthikanti et al. 2022), experts over `ep` with a
ragged all-to-all, gradients summed in three flat buffers after backward. Parameters have the names of `plain_moe.py`,
and this rank's part of their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_moe import PlainAttention, PlainMoe, choose, feed_forward, norm, probabilities
from torch import Tensor, nn

from moec.grammar.spec import Gqa, Layer, Mha, Moe, Spec

IGNORED_LABEL = -100
Group = dist.ProcessGroup

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: Tensor, group: Group) -> Tensor:
    """Every rank's x [batch, sequence / n, ...], concatenated along the sequence."""
    pieces = x.new_empty((group.size(), *x.shape))
    gather_single(pieces.view(-1), x.contiguous().view(-1), group=group)
    return torch.cat(pieces.unbind(0), 1)


def scattered(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x [batch, sequence, ...], sharded along the sequence."""
    pieces = torch.stack(x.chunk(group.size(), 1))
    out = torch.empty_like(pieces[0])
    reduce_scatter_single(out.view(-1), pieces.view(-1), group=group)
    return out


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scattered(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty((sum(receive), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_empty((sum(ctx.send), grad.shape[1]))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


class ShardedCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy of logits [tokens, vocab / n], of which each rank has consecutive ids."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = (logits - largest[:, None]).exp_()
        local = labels - group.rank() * logits.shape[1]
        mine = (local >= 0) & (local < logits.shape[1])
        local = local.where(mine, 0)
        picked = (logits.gather(1, local[:, None])[:, 0] - largest).where(mine, 0.0)
        sums = torch.stack([shifted.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        valid = labels != IGNORED_LABEL
        ctx.save_for_backward(shifted.div_(sums[0, :, None]), local, mine, valid)
        return ((sums[0].log() - sums[1]) * valid).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local, mine, valid = ctx.saved_tensors
        probabilities[torch.arange(len(local)), local] -= mine.to(probabilities.dtype)
        return probabilities.mul_((grad * valid)[:, None]), None, None


class ShardedAttention(PlainAttention):
    """A rank's heads over all tokens; input and output are a rank's part of each sequence."""

    def __init__(self, dim: int, attention: Gqa | Mha, context: int, tp: Group) -> None:
        kv_heads = attention.kv_heads if isinstance(attention, Gqa) else attention.heads
        width = attention.head_dim or dim // attention.heads
        own = Gqa(
            heads=attention.heads // tp.size(), kv_heads=kv_heads // tp.size(), head_dim=width, rope=attention.rope
        )
        super().__init__(dim, own, context)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = Gather.apply(x, self.tp)
        part: Tensor = Scatter.apply(super().forward(whole), self.tp)
        return part


class ShardedMoe(PlainMoe):
    """A rank's experts; tokens are sent to other ranks' experts and back."""

    def __init__(self, dim: int, moe: Moe, ep: Group, tp: Group) -> None:
        super().__init__(dim, moe)
        self.ep, self.tp, self.own = ep, tp, self.num_experts // ep.size()
        self.experts = nn.ModuleList(feed_forward(dim, moe.experts.body) for _ in range(self.own))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        logits = F.linear(x, self.gate.weight)
        weights, chosen = choose(logits, self.topk)
        return self.mix(x.flatten(0, 1), weights, chosen).view_as(x), self.balance(logits, chosen)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ranks, k = self.ep.size(), self.topk.k
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts).view(ranks, self.own)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.ep)
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        rows = AllToAll.apply(x.index_select(0, order // k), send, receive, self.ep)
        # Rows arrive by source; grouped products need them by expert.
        chunks = rows.split(theirs.flatten().tolist())
        out: list[Tensor] = [x] * (ranks * self.own)
        for number, expert in enumerate(self.experts):
            places = range(number, ranks * self.own, self.own)
            own = expert(torch.cat([chunks[place] for place in places]))
            for place, part in zip(places, own.split([len(chunks[place]) for place in places]), strict=True):
                out[place] = part
        back = AllToAll.apply(torch.cat(out), receive, send, self.ep)
        unsorted = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        by_token = back.index_select(0, unsorted).unflatten(0, (-1, k))
        return (by_token * weights.flatten(0, 1)[..., None]).sum(1)

    def balance(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Switch's loss by sequence: shares over the whole of it, probabilities of this rank's piece."""
        counts = F.one_hot(chosen.flatten(1), self.num_experts).sum(1)
        dist.all_reduce(counts, group=self.tp)
        share = counts.to(logits.dtype) / (chosen.shape[1] * self.tp.size() * self.topk.k)
        mean = probabilities(logits, self.topk.score).sum(1) / (chosen.shape[1] * self.tp.size())
        (term,) = self.terms
        return self.num_experts * (share * mean).sum(-1).mean() * term.weight


class ShardedLayer(nn.Module):
    def __init__(self, spec: Spec, layer: Layer, context: int, tp: Group, ep: Group) -> None:
        super().__init__()
        model = spec.model
        assert layer.moe is not None
        self.attention_norm, self.ffn_norm = norm(model), norm(model)
        self.attention = ShardedAttention(model.dim, layer.attention, context, tp)
        self.moe = ShardedMoe(model.dim, layer.moe, ep, tp)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        x = x + self.attention(self.attention_norm(x))
        mixed, balance = self.moe(self.ffn_norm(x))
        return x + mixed, balance


class ShardedModel(nn.Module):
    """`model(tokens, labels)`, backward of the first it gives, `reduce_gradients()`, `clip(max_norm)`."""

    def __init__(self, spec: Spec, dp: Group, tp: Group, ep: Group, edp: Group) -> None:
        super().__init__()
        model = spec.model
        assert spec.train is not None
        self.dp, self.tp, self.ep, self.edp = dp, tp, ep, edp
        self.embedding = nn.Embedding(model.vocab // tp.size(), model.dim)
        self.layers = nn.ModuleList(ShardedLayer(spec, layer, spec.train.sequence, tp, ep) for layer in model.layers)
        self.norm = norm(model)
        self.head = nn.Linear(model.dim, model.vocab // tp.size(), bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The scalar to differentiate, and the loss."""
        local = tokens - self.tp.rank() * self.embedding.num_embeddings
        mine = (local >= 0) & (local < self.embedding.num_embeddings)
        x = Scatter.apply(self.embedding(local.where(mine, 0)) * mine[..., None], self.tp)
        balance: Tensor | float = 0.0
        for layer in self.layers:
            x, term = layer(x)
            balance = balance + term
        logits = self.head(Gather.apply(self.norm(x), self.tp))
        total = ShardedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.tp)
        valid = torch.stack([(labels != IGNORED_LABEL).sum(), torch.tensor(len(tokens))])
        dist.all_reduce(valid, group=self.dp)
        # All ranks of a tp group have the same cross-entropy, and each the balance of its own tokens.
        entropy, balance = total / valid[0], balance * len(tokens) / valid[1]
        value = (entropy / self.tp.size() + balance).detach()
        dist.all_reduce(value)
        return entropy + balance, value

    @cached_property
    def parts(self) -> list[tuple[list[nn.Parameter], Group | None]]:
        """Parameters by the group that sums their gradients; None: all ranks."""
        named = dict(self.named_parameters())
        experts = [name for name in named if ".experts." in name]
        replicated = [name for name in named if "norm" in name or name.endswith("moe.gate.weight")]
        sharded = [name for name in named if name not in {*experts, *replicated}]
        groups = zip((sharded, replicated, experts), (self.dp, None, self.edp), strict=True)
        return [([named[name] for name in names], group) for names, group in groups]

    def reduce_gradients(self) -> None:
        pending = []
        for parameters, group in self.parts:
            flat = torch.cat([p.grad.view(-1) for p in parameters if p.grad is not None])
            pending.append((parameters, flat, dist.all_reduce(flat, group=group, async_op=True)))
        for parameters, flat, work in pending:
            work.wait()
            for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = piece.view_as(parameter)

    def clip(self, max_norm: float) -> Tensor:
        squares = [_square_sum(parameters) for parameters, _ in self.parts]
        dist.all_reduce(squares[0], group=self.tp)
        dist.all_reduce(squares[2], group=self.ep)
        total = torch.stack(squares).sum().sqrt()
        torch._foreach_mul_(
            [p.grad for parameters, _ in self.parts for p in parameters], (max_norm / (total + 1e-6)).clamp(max=1.0)
        )
        return total


def _square_sum(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.stack(torch._foreach_norm([p.grad for p in parameters])).square().sum()

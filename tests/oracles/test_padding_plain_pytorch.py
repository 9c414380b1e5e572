"""Padding against the handwritten model, whose mixtures get only the real tokens of each routing group."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.same import pair, require_same
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainMoe, choose, probabilities
from support.combinations import diagonals
from torch import Tensor

from moec.grammar.spec import SwitchLoss

ORACLE_OF = {
    "tokens": "padding",
}

PADDING = 7
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{
        experts = 4 * swiglu(20, bias = true)
        gate = topk(2, score = {score})
        balance = [switch_loss(0.3), z_loss(0.05)]
        {beside}
      }}
    }}
"""
BESIDE = {
    "dropless": "",
    "dropless-batch": "group = batch",
    "dynamic": "capacity = dynamic()",
    "shared": "shared = swiglu(12)",
    **{
        f"factor-{factor}-{group}": f"capacity = factor({factor}); group = {group}"
        for factor in ("0.5", "1.0", "1.25")
        for group in ("sequence", "batch", "rank")
    },
    "dynamic-max": "capacity = dynamic(max = 0.5)",
}


class PaddedMoe(PlainMoe):
    """`PlainMoe` with a mask `real` [batch, sequence] of real tokens."""

    real: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        weights, chosen = choose(logits, self.topk)
        mixed = torch.zeros_like(x)
        for group in self.groups(x):
            for sequence, token, choice in self.served(group, chosen):
                expert = self.experts[int(chosen[sequence, token, choice])]
                row = weights[sequence, token, choice] * expert(x[sequence, token])
                mixed = mixed.index_put((torch.tensor(sequence), torch.tensor(token)), row, accumulate=True)
        return self.with_dense_paths(x, mixed), self.balance(logits, chosen)

    def groups(self, x: Tensor) -> list[list[int]]:
        """The sequences of each routing group; one rank has them all."""
        sequences = list(range(x.shape[0]))
        return [[sequence] for sequence in sequences] if self.group == "sequence" else [sequences]

    def served(self, group: list[int], chosen: Tensor) -> list[tuple[int, int, int]]:
        """The real tokens' choices that find a place, which are counted from all of the group's tokens."""
        factor, least = self.places()
        places, k = math.inf, self.topk.k
        if factor is not None:
            places = max(least, math.ceil(factor * k * len(group) * chosen.shape[1] / self.num_experts))
        taken, kept = [0] * self.num_experts, []
        for choice in range(k):
            for sequence in group:
                for token in self.real[sequence].nonzero()[:, 0].tolist():
                    expert = int(chosen[sequence, token, choice])
                    if taken[expert] < places:
                        kept.append((sequence, token, choice))
                    taken[expert] += 1
        return kept

    def balance(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Each term's mean over real tokens; of the Switch loss, over groups, weighted by their real tokens."""
        total = logits.new_zeros(())
        for term in self.terms:
            if isinstance(term, SwitchLoss):
                for group in self.groups(logits):
                    own = self.real[group]
                    if own.any():
                        scores = probabilities(logits, self.topk.score)[group][own]
                        counts = torch.bincount(chosen[group][own].flatten(), minlength=self.num_experts)
                        share = counts.to(scores.dtype) / counts.sum()
                        value = self.num_experts * (share * scores.mean(0)).sum()
                        total = total + term.weight * value * own.sum() / self.real.sum()
            else:
                total = total + term.weight * logits[self.real].logsumexp(-1).square().mean()
        return total


def padding_of(where: str) -> Tensor:
    """[3, 13] tokens, some of them padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(PADDING + 1, VOCAB, (3, 13), generator=generator)
    columns = torch.arange(13)
    padded = {
        "right": columns >= torch.tensor([[9], [13], [4]]),
        "left": columns < torch.tensor([[6], [0], [2]]),
        "anywhere": torch.rand(3, 13, generator=generator) < 0.4,
        "a whole sequence": columns < torch.tensor([[0], [13], [3]]),
        "none": columns < torch.zeros(3, 1),
    }[where]
    return tokens.masked_fill(padded, PADDING)


WHERE = ["right", "left", "anywhere", "a whole sequence", "none"]


@pytest.mark.parametrize(("beside", "where"), diagonals(list(BESIDE), WHERE, number=2))
def test_reference_equals_the_handwritten_model_with_padding(beside: str, where: str) -> None:
    layers = LAYERS.format(score="sigmoid" if beside == "dynamic" else "softmax", beside=BESIDE[beside])
    spec = small_spec(layers, embedding=f"tokens(padding = {PADDING})")
    ours, plain, generator = pair(spec)
    tokens, labels = padding_of(where), torch.randint(VOCAB, (3, 13), generator=generator)
    labels[tokens == PADDING] = -100
    for module in plain.modules():
        if isinstance(module, PlainMoe):
            module.__class__ = PaddedMoe
            module.real = tokens != PADDING
    require_same(ours, plain, tokens, labels)
